// What is the same for all devices.
#include "device/device.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/populate.h"
#include "device/access.h"

namespace rejoin::device {

Memory on_heap(std::size_t size) {
  auto bytes = std::make_shared<Bytes>(size);
  return {*bytes, bytes};
}

Result<std::unique_ptr<Access>> Device::make_access() { return make_access(Priority::high); }

Result<Memory> side_by_side(std::span<const Handle> handles) {
  constexpr std::uint64_t most = std::uint64_t{1} << 47;
  const auto bad = [&] {
    return fail(ErrorCode::corrupt, "{} handles of GPU memory that is not in one piece", handles.size());
  };
  if (handles.empty()) return bad();
  std::uint64_t size = 0;
  for (const auto& handle : handles) {
    if (handle.kind != Handle::Kind::address || handle.size == 0 || handle.size > most || handle.address > most ||
        handle.address != handles[0].address + size)
      return bad();
    size += handle.size;
  }
  return Memory{{reinterpret_cast<std::byte*>(handles[0].address), size}, nullptr};
}

Result<> zero_fresh(Device& device, std::span<std::byte> memory) {
  if (device.kind() == MemoryKind::host) return populate(memory);
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
    if (!options.pci.empty() || parse_number(which, options.ordinal)) return open_cuda(options);
  }
  return fail(ErrorCode::invalid_argument,
              "no device is called '{}': there are host, cuda, cuda:NUMBER and cuda:PCI-ADDRESS", name);
}

}  // namespace rejoin::device
