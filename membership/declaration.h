// What replicas must declare alike, compared for people.
#pragma once

#include <string>

#include "control.pb.h"

namespace rejoin::membership {

// In which tensor two declarations differ first, and how: "tensor 'w' has 3 elements of float32 … here, and 4 elements
// of float32 … there". Where that is behind what there was room to tell (Declaration.omitted), and not in
// the fingerprint, it says so. Empty: in none that they tell.
std::string first_difference(const proto::Declaration& here, const proto::Declaration& there);

// The trainers' own fingerprints, where they differ: "'torch 2.14' here, and 'torch 2.15' there, from byte 9 on". Of
// long ones what is around that byte. Empty: they are the same.
std::string fingerprint_difference(const proto::Declaration& here, const proto::Declaration& there);

}  // namespace rejoin::membership
