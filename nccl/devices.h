// Which devices NCCL is offered, and what each is.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::nccl {

struct Settings {
  // REJOIN_NCCL_DEVICES: transports as in transport/factory.h, a device each, separated by spaces. Several rails of one
  // device, separated by commas, fail over to each other. Empty: each active RDMA port, or "tcp" where there is none.
  std::string devices;
  // REJOIN_NCCL_ADDRESS: of this machine, where connections are accepted. Empty: that of the first network interface
  // that is up and no loopback, or 127.0.0.1.
  std::string address;
  std::string modules = "/sys/module";  // the kernel's that are loaded, a folder each
};
Settings settings_from_environment();
void warn_of_unknown_settings();  // REJOIN_NCCL_… that is neither: it would have no effect, and nobody would know

struct DeviceInfo {
  std::string transport;  // for transport::make_engine()
  std::string name;       // in NCCL's log
  std::string pci_path;   // in /sys; empty: none
  std::uint64_t guid = 0;
  int speed_mbps = 0, port = 1;
  bool cuda = false, dma_buf = false;  // reaches GPU memory, as peer memory or by dma-buf
  std::vector<int> parts;              // of a virtual device: the others' numbers
};

// What two devices must have alike to reach each other, as a handle has it. Zeros, as of an earlier release: not told.
struct Family {
  static constexpr std::uint8_t kSeveral = 2;  // of two numbers of rails from two on the smaller one is used
  std::array<char, 7> kind{};
  std::uint8_t rails = 0;  // one or kSeveral
  friend bool operator==(const Family&, const Family&) = default;
  bool told() const { return *this != Family{}; }
  std::string text() const;  // "tcp over several rails"
};
Family family_of(const std::string& transport);

// Errors name REJOIN_NCCL_DEVICES and the device: there is no such one, or what is said of it makes no transport here.
Result<std::vector<DeviceInfo>> find_devices(const Settings& settings);
// One device with the rails of all. Errors: `invalid_argument` where they are of several kinds, or can't be rails.
Result<DeviceInfo> join_devices(const std::vector<DeviceInfo>& all, const std::vector<int>& parts);
Result<std::string> local_address(const Settings& settings);
Error of_device(int number, const std::string& name, const Error& error);  // the same, with what it is of

}  // namespace rejoin::nccl
