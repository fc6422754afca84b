// torch's Gloo beside ours, by a script that is part of the program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::bench {

// Milliseconds from the kill of a member until the last survivor's next finished all-reduce, of each round. Errors say
// what is not there, or what the script said.
Result<std::vector<double>> gloo_recovery(const std::string& python, std::uint32_t members, std::uint64_t bytes,
                                          int rounds);

}  // namespace rejoin::bench
