// What is the same for all devices.
#include "device/device.h"

#include <charconv>

namespace rejoin::device {

Memory on_heap(std::size_t size) {
  auto bytes = std::make_shared<Bytes>(size);
  return {*bytes, bytes};
}

Result<> zero_fresh(Device& device, std::span<std::byte> memory) {
  if (device.kind() == MemoryKind::host) return {};
  auto stream = device.make_stream();
  if (!stream) return tl::unexpected(stream.error());
  if (auto cleared = (*stream)->clear(memory.data(), memory.size()); !cleared) return cleared;
  return (*stream)->synchronize();
}

Result<std::shared_ptr<Device>> open_device(const std::string& name) {
  if (name == "host") return make_host();
  CudaOptions options;
  if (name == "cuda") return open_cuda(options);
  constexpr std::string_view prefix = "cuda:";
  if (name.starts_with(prefix)) {
    const std::string which = name.substr(prefix.size());
    if (which.find(':') != std::string::npos) options.pci = which;
    const auto [end, error] = std::from_chars(which.data(), which.data() + which.size(), options.ordinal);
    if (!options.pci.empty() || (error == std::errc() && end == which.data() + which.size())) return open_cuda(options);
  }
  return fail(ErrorCode::invalid_argument,
              "no device is called '{}': there are host, cuda, cuda:NUMBER and cuda:PCI-ADDRESS", name);
}

}  // namespace rejoin::device
