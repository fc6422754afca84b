// Which CUDA driver a test loads: the one made of software, or where REJOIN_CUDA names one (`./run gpu test`), that.
#pragma once

#include <cstdlib>
#include <string>

namespace rejoin::device {

inline std::string cuda_library() {
  const char* given = std::getenv("REJOIN_CUDA");
  return given == nullptr ? REJOIN_FAKE_CUDA : given;
}
inline bool is_real() { return std::getenv("REJOIN_CUDA") != nullptr; }

}  // namespace rejoin::device
