// What replicas must declare alike, compared for people.
#pragma once

#include <string>

#include "control.pb.h"

namespace rejoin::membership {

// In which tensor two declarations differ first, and how: "tensor 'w' has 3 elements of float32 … here, and 4 elements
// of float32 … there". Empty: in none that they tell.
std::string first_difference(const proto::Declaration& here, const proto::Declaration& there);

}  // namespace rejoin::membership
