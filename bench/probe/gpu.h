// The GPU that is probed.
#pragma once

#include "bench/probe/probes.h"
#include "bench/probe/process.h"
#include "device/device.h"

namespace rejoin::bench {

inline std::shared_ptr<device::Device> open(const Settings& s) { return must(device::open_cuda({.ordinal = s.cuda})); }

}  // namespace rejoin::bench
