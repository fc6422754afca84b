// The text that the demo's model learns, and where in it the samples are.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace rejoin::demo {

Result<std::string> read_text(const std::string& path);  // at least 1000 bytes

// Where in the first `size` bytes a sample begins: by a fixed odd stride, so that neighbours in the stream are far
// apart.
inline std::uint64_t position_of(std::uint64_t sample, std::size_t size) { return sample * 2654435761ull % size; }

}  // namespace rejoin::demo
