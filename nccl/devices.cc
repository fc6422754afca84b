#include "nccl/devices.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/digest.h"
#include "base/fail.h"
#include "base/log.h"
#include "transport/factory.h"
#include "transport/ibverbs/factory.h"

namespace rejoin::nccl {

namespace {

// NCCL has hundreds of connections and a few messages under way on each; their completions share a queue.
constexpr const char* kDepth = ";depth=64";
constexpr int kUnknownSpeed = 10000;  // as NCCL takes it where a network doesn't say

struct Interface {
  std::string name, address;
  bool loopback = false;
};

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, ::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_UP) == 0) continue;
    char text[INET_ADDRSTRLEN] = {};
    const auto* address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
    if (::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text) != nullptr)
      found.push_back({one->ifa_name, text, (one->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return found;
}

void describe_interface(const std::string& address, DeviceInfo& device) {
  device.speed_mbps = kUnknownSpeed;
  for (const auto& one : interfaces()) {
    if (one.address != address) continue;
    const std::filesystem::path folder = "/sys/class/net/" + one.name;
    int speed = 0;
    if (std::ifstream(folder / "speed") >> speed && speed > 0) device.speed_mbps = speed;
    std::error_code none;
    const auto path = std::filesystem::canonical(folder / "device", none);
    if (!none && path.string().find("/pci") != std::string::npos) device.pci_path = path;
    device.guid = digest(as_bytes(one.name));
    return;
  }
}

// What a transport's text says: "KIND:LIST;SETTINGS". Of RDMA each rail in the list has settings of its own.
struct Parts {
  std::string kind, list, settings;
  bool is_tcp() const { return kind == "tcp" || kind == "tcp+aes"; }
};
Parts parts_of(const std::string& transport) {
  Parts parts{.kind = transport.substr(0, transport.find_first_of(":;")), .list = {}, .settings = {}};
  const std::string rest = transport.substr(parts.kind.size());
  const auto settings = parts.is_tcp() ? std::min(rest.find(';'), rest.size()) : rest.size();
  parts.list = rest.substr(0, settings).substr(rest.starts_with(':') ? 1 : 0);
  parts.settings = rest.substr(settings);
  return parts;
}

// No connection can come from such an address, though a listener may be bound to it.
Result<> check_one_machines(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  const bool is_v4 = ::inet_pton(AF_INET, host.c_str(), &v4) == 1;
  const bool bracketed = host.starts_with('[') && host.ends_with(']');
  const bool is_v6 =
      ::inet_pton(AF_INET6, bracketed ? host.substr(1, host.size() - 2).c_str() : host.c_str(), &v6) == 1;
  const auto number = ntohl(v4.s_addr);
  if ((is_v4 && (number == INADDR_ANY || number == INADDR_BROADCAST || IN_MULTICAST(number))) ||
      (is_v6 && (IN6_IS_ADDR_UNSPECIFIED(&v6) || IN6_IS_ADDR_MULTICAST(&v6))))
    return fail(ErrorCode::invalid_argument, "'{}' is no address of one machine: name that of an interface", host);
  return {};
}

// An engine is made and dropped: what is wrong shows before NCCL takes this network.
Result<> can_be_made(const std::string& transport) {
  auto engine = transport::make_engine(transport);
  return engine ? (*engine)->usable() : tl::unexpected(engine.error());
}

Result<DeviceInfo> describe(const std::string& transport, const std::string& address, const std::string& modules) {
  DeviceInfo device{.transport = transport, .name = transport};
  const Parts parts = parts_of(transport);
  const auto& [kind, list, settings] = parts;
  if (kind != "ibverbs" && !parts.is_tcp() && kind != "shm" && kind != "ucx")
    return fail(ErrorCode::invalid_argument, "no transport '{}': use ibverbs:, tcp, tcp+aes, ucx: or shm", transport);
  if (parts.is_tcp())
    for (const auto& host : split(list, ','))
      if (auto right = check_one_machines(host); !right) return tl::unexpected(right.error());
  if (kind != "ibverbs") {
    if (auto can = can_be_made(transport); !can) return tl::unexpected(can.error());
    describe_interface(parts.is_tcp() && !list.empty() ? list.substr(0, list.find(',')) : address, device);
    return device;
  }
  if (list.empty()) return fail(ErrorCode::invalid_argument, "'{}' names no RDMA device", transport);
  std::error_code none;
  device.cuda = std::filesystem::exists(std::filesystem::path(modules) / "nvidia_peermem", none);
  device.dma_buf = true;
  for (const auto& rail : split(list, ',')) {
    auto port = transport::ibverbs::describe_port(rail);
    if (!port) return tl::unexpected(port.error());
    if (device.speed_mbps == 0) {
      device.pci_path = port->pci_path;
      device.guid = port->guid;
      device.port = static_cast<int>(port->port);
    }
    device.speed_mbps += static_cast<int>(port->speed_mbps);
    device.dma_buf &= port->dma_buf;
  }
  return device;
}

// Where nobody has said which.
std::vector<std::string> found_by_themselves() {
  const auto ports = transport::ibverbs::find_ports();
  std::vector<std::string> names;
  for (const auto& port : ports.names) names.push_back("ibverbs:" + port + kDepth);
  if (!names.empty()) return names;
  if (!ports.left_out.empty())
    logger().warn(
        "no RDMA port is active here, but there is {}: the device is tcp. A node whose ports are active can't connect "
        "with this one: mend the port, or set REJOIN_NCCL_DEVICES alike on all nodes",
        fmt::join(ports.left_out, "; "));
  return {"tcp"};
}

}  // namespace

Family family_of(const std::string& transport) {
  const Parts parts = parts_of(transport);
  Family family;
  std::copy_n(parts.kind.begin(), std::min(parts.kind.size(), family.kind.size()), family.kind.begin());
  const bool has_rails = parts.is_tcp() || parts.kind == "ibverbs";
  family.rails = has_rails && transport::rails_of(transport) > 1 ? Family::kSeveral : 1;
  return family;
}

std::string Family::text() const {
  const std::string_view name(kind.data(), kind.size());
  const std::string shown = printable(name.substr(0, name.find('\0')), kind.size());
  return rails > 1 ? shown + " over several rails" : shown;
}

Error of_device(int number, const std::string& name, const Error& error) {
  return {error.code, fmt::format("REJOIN_NCCL_DEVICES: device {} ({}): {}", number, name, error.message)};
}

Settings settings_from_environment() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  return {.devices = variable("REJOIN_NCCL_DEVICES"), .address = variable("REJOIN_NCCL_ADDRESS")};
}

void warn_of_unknown_settings() {
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view entry = *variable, name = entry.substr(0, entry.find('='));
    if (name.starts_with("REJOIN_NCCL_") && name != "REJOIN_NCCL_DEVICES" && name != "REJOIN_NCCL_ADDRESS")
      logger().warn(
          "the variable {} is none of Rejoin's, and is ignored: the NCCL plugin reads REJOIN_NCCL_DEVICES and "
          "REJOIN_NCCL_ADDRESS",
          name);
  }
}

Result<std::string> local_address(const Settings& settings) {
  const auto all = interfaces();
  if (!settings.address.empty()) {
    if (std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.address == settings.address; }))
      return settings.address;
    return fail(ErrorCode::invalid_argument,
                "REJOIN_NCCL_ADDRESS={}: no interface of this machine that is up has this IPv4 address",
                settings.address);
  }
  for (const auto& one : all)
    if (!one.loopback) return one.address;
  return "127.0.0.1";
}

Result<std::vector<DeviceInfo>> find_devices(const Settings& settings) {
  auto address = local_address(settings);
  if (!address) return tl::unexpected(address.error());
  std::vector<std::string> names;
  for (const auto& name : split(settings.devices, ' '))
    if (!name.empty()) names.push_back(name);
  if (names.empty()) names = found_by_themselves();
  std::vector<DeviceInfo> devices;
  for (const auto& name : names) {
    auto device = describe(name, *address, settings.modules);
    if (!device) return tl::unexpected(of_device(static_cast<int>(devices.size()), name, device.error()));
    device->parts = {static_cast<int>(devices.size())};
    devices.push_back(std::move(*device));
  }
  return devices;
}

Result<DeviceInfo> join_devices(const std::vector<DeviceInfo>& all, const std::vector<int>& parts) {
  std::optional<DeviceInfo> joined;
  for (const int part : parts) {
    if (part < 0 || static_cast<std::size_t>(part) >= all.size())
      return fail(ErrorCode::invalid_argument, "a virtual device of device {}, and there are {}", part, all.size());
    const DeviceInfo& one = all[static_cast<std::size_t>(part)];
    if (!joined) {
      joined = one;
      continue;
    }
    const Parts before = parts_of(joined->transport), added = parts_of(one.transport);
    if ((added.kind != "ibverbs" && !added.is_tcp()) || before.list.empty() || added.list.empty() ||
        before.kind != added.kind || before.settings != added.settings)
      return fail(ErrorCode::invalid_argument, "{} and {} can't be rails of one device", joined->transport,
                  one.transport);
    joined->transport = fmt::format("{}:{},{}{}", added.kind, before.list, added.list, added.settings);
    joined->name = joined->transport;
    joined->speed_mbps += one.speed_mbps;
    joined->cuda &= one.cuda;
    joined->dma_buf &= one.dma_buf;
  }
  if (!joined) return fail(ErrorCode::invalid_argument, "a virtual device of no device");
  joined->parts = parts;
  return std::move(*joined);
}

}  // namespace rejoin::nccl
