#include <charconv>

#include "device/device.h"

namespace rejoin::device {

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
