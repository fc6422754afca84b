#include "device/gpus.h"

#include <array>

#include "base/fail.h"
#include "base/shared_library.h"
#include "device/cuda_driver.h"

namespace rejoin::device {

Result<std::vector<GpuInfo>> list_gpus(const std::string& library) {
  constexpr cuda::Status no_device = 100;  // CUDA_ERROR_NO_DEVICE
  if (auto there = SharedLibrary::load(library, "NVIDIA's driver"); !there) return tl::unexpected(there.error());
  const auto driver = cuda::load_driver(library);
  if (!driver) return fail(ErrorCode::io, "{}", driver.error().message);
  const cuda::Driver& cuda = **driver;
  std::vector<GpuInfo> all;
  const auto started = cuda.init(0);
  if (started == no_device) return all;
  if (auto done = cuda.check(started, "starting the CUDA driver"); !done)
    return fail(ErrorCode::io, "{}", done.error().message);
  int count = 0;
  if (auto done = cuda.check(cuda.device_count(&count), "counting CUDA devices"); !done)
    return fail(ErrorCode::io, "{}", done.error().message);
  for (int i = 0; i < count; ++i) {
    cuda::Ordinal device = 0;
    std::array<char, 256> name{};
    int dma_buf = 0;
    auto done = cuda.check(cuda.device_get(&device, i), "looking for a CUDA device");
    if (done) done = cuda.check(cuda.device_name(name.data(), name.size() - 1, device), "naming a CUDA device");
    if (!done) return fail(ErrorCode::io, "CUDA device {}: {}", i, done.error().message);
    if (cuda.device_attribute(&dma_buf, cuda::kAttributeDmaBuf, device) != cuda::kSuccess) dma_buf = 0;  // an old one
    all.push_back({fmt::format("{} (CUDA device {})", name.data(), i), dma_buf != 0});
  }
  return all;
}

}  // namespace rejoin::device
