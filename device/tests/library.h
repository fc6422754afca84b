// Which CUDA driver a test loads: the one made of software, or where REJOIN_CUDA names one (`./run gpu test`), that.
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "device/device.h"

namespace rejoin::device {

inline std::string cuda_library() {
  const char* given = std::getenv("REJOIN_CUDA");
  return given == nullptr ? REJOIN_FAKE_CUDA : given;
}
inline bool is_real() { return std::getenv("REJOIN_CUDA") != nullptr; }

// Its first device.
inline std::shared_ptr<Device> test_gpu() {
  auto opened = open_cuda({.ordinal = 0, .library = cuda_library()});
  if (!opened) throw std::runtime_error(opened.error().message);
  return *opened;
}

// Between two looks at what a GPU does: otherwise whoever waits takes the CPU from the threads of one that is made of
// software.
inline void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

}  // namespace rejoin::device
