// Which GPUs there are, without a context on any of them: nothing of their memory is taken.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::device {

struct GpuInfo {
  std::string name;      // "NVIDIA H200 (CUDA device 0)"
  bool dma_buf = false;  // the driver gives its memory out as dma-bufs
};
// Errors: `unavailable`: there is no driver; `io`: it is too old, or does not start, with its words.
Result<std::vector<GpuInfo>> list_gpus(const std::string& library = "libcuda.so.1");

}  // namespace rejoin::device
