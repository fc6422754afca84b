#include "transport/ibverbs/device.h"

#include <arpa/inet.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "base/fail.h"
#include "base/number.h"

namespace rejoin::transport::ibverbs {

namespace {

struct DeviceList {
  int count = 0;
  ibv_device** devices = verbs().get_device_list(&count);
  ~DeviceList() {
    if (devices != nullptr) verbs().free_device_list(devices);
  }
};

bool number_within(std::string_view text, std::uint32_t least, std::uint32_t most, std::uint32_t& value) {
  return parse_number(text, value) && value >= least && value <= most;
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr unsigned char prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof prefix) == 0;
}

// Of fe80::/10 or 169.254.0.0/16: it has no meaning beyond the port's own link, and no router passes it on.
bool is_link_local(const ibv_gid& gid) {
  if (is_ipv4(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

// The larger, the better: an interface that comes up has its link-local address first, and the one that routers pass on
// later.
int reach_of(const ibv_gid& gid) { return is_link_local(gid) ? 1 : is_ipv4(gid) ? 3 : 2; }

}  // namespace

Result<> available() {
  if (auto there = load_verbs(); !there) return tl::unexpected(there.error());
  return {};
}

Ports find_ports() {
  Ports ports;
  if (!load_verbs()) return ports;
  const DeviceList list;
  for (int i = 0; i < list.count; ++i) {
    const std::string name = verbs().get_device_name(list.devices[i]);
    if (list.devices[i]->transport_type != IBV_TRANSPORT_IB) {
      ports.left_out.push_back(fmt::format("{}, which is neither InfiniBand nor RoCE", name));
      continue;
    }
    errno = 0;
    const Context context(verbs().open_device(list.devices[i]));
    ibv_device_attr limits{};
    if (!context || verbs().query_device(context.get(), &limits) != 0) {
      ports.left_out.push_back(fmt::format("{}, which can't be opened: {}", name, std::strerror(errno)));
      continue;
    }
    for (std::uint8_t port = 1; port <= limits.phys_port_cnt; ++port) {
      ibv_port_attr attributes{};
      if (verbs().query_port(context.get(), port, attributes) == 0 && attributes.state == IBV_PORT_ACTIVE)
        ports.names.push_back(fmt::format("{}:{}", name, port));
      else ports.left_out.push_back(fmt::format("{}:{}, which is not active", name, port));
    }
  }
  return ports;
}

std::vector<std::string> active_ports() { return find_ports().names; }

Result<Options> parse_options(const std::string& text) {
  Options options;
  std::string_view rest = text;
  for (bool first = true; !rest.empty() || first; first = false) {
    const std::string_view part = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    if (first) {
      options.device = part;
      continue;
    }
    const auto equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    const std::string_view given = equals == std::string_view::npos ? "" : part.substr(equals + 1);
    std::uint32_t value = 0;
    const auto take = [&](std::uint32_t least, std::uint32_t most) { return number_within(given, least, most, value); };
    bool good = false;
    if (name == "gid" && (good = take(0, 255))) options.gid_index = value;
    else if (name == "qps" && (good = take(1, 8))) options.queue_pairs = value;
    else if (name == "depth" && (good = take(16, 4096))) options.queue_depth = value;
    else if (name == "mtu" && (good = take(256, 4096))) options.mtu = value;
    else if (name == "sl" && (good = take(0, 15))) options.service_level = static_cast<std::uint8_t>(value);
    else if (name == "tc" && (good = take(0, 255))) options.traffic_class = static_cast<std::uint8_t>(value);
    else if (name == "timeout" && (good = take(1, 31))) options.timeout = static_cast<std::uint8_t>(value);
    else if (name == "retries" && (good = take(0, 7))) options.retries = static_cast<std::uint8_t>(value);
    else if (name == "ooo" && (good = take(0, 1))) options.out_of_order = value == 1;
    else if (name == "cm" && (good = !given.empty())) options.connection_manager = given == "auto" ? "" : given;
    if (!good)
      return fail(ErrorCode::invalid_argument,
                  "'{}' of rail '{}': settings are gid (0-255), qps (1-8), depth (16-4096), mtu (256-4096), sl (0-15), "
                  "tc (0-255), timeout (1-31), retries (0-7), ooo (0, 1), cm (an address for rdma_cm, or auto), as in "
                  "mlx5_0;gid=3;tc=106",
                  part, text);
  }
  return options;
}

Result<Device> Device::open(const Options& options) {
  Device device;
  std::string name = options.device;
  if (const auto colon = name.find(':'); colon != std::string::npos) {
    std::uint32_t port = 0;
    if (!number_within(std::string_view(name).substr(colon + 1), 1, 255, port))
      return fail(ErrorCode::invalid_argument, "rail '{}': the port after ':' is no number from 1", options.device);
    device.port_number_ = static_cast<std::uint8_t>(port);
    name.resize(colon);
  }
  device.name_ = fmt::format("{}:{}", name, device.port_number_);
  if (auto there = load_verbs(); !there) return tl::unexpected(there.error());
  const DeviceList list;
  if (list.devices == nullptr || list.count == 0)
    return fail(ErrorCode::unavailable,
                "rail {}: this machine has no RDMA device; is its driver loaded, and /sys/class/infiniband mounted?",
                device.name_);
  ibv_device* found = nullptr;
  std::string known;
  for (int i = 0; i < list.count; ++i) {
    const std::string one = verbs().get_device_name(list.devices[i]);
    known += (known.empty() ? "" : ", ") + one;
    if (one == name) found = list.devices[i];
  }
  if (found == nullptr) return fail(ErrorCode::not_found, "no RDMA device '{}'; there are: {}", name, known);
  device.context_ = Context(verbs().open_device(found));
  if (!device.context_)
    return fail(ErrorCode::unavailable,
                "rail {}: can't open the device: {}; may this user read and write /dev/infiniband?", device.name_,
                std::strerror(errno));
  if (verbs().query_device(device.context_.get(), &device.limits_) != 0)
    return fail_errno("ibv_query_device " + device.name_);
  device.wanted_gid_ = options.gid_index;
  if (auto fresh = device.refresh(); !fresh && fresh.error().code == ErrorCode::not_found)
    return tl::unexpected(fresh.error());
  device.domain_ = ProtectionDomain(verbs().alloc_pd(device.context_.get()));
  if (!device.domain_) return fail_errno("ibv_alloc_pd " + device.name_);
  return device;
}

Result<> Device::refresh() {
  ibv_port_attr port{};
  if (verbs().query_port(context_.get(), port_number_, port) != 0)
    return fail(ErrorCode::not_found, "rail {}: the device has no such port, but 1 to {}", name_,
                limits_.phys_port_cnt);
  port_ = port;
  const bool active = port.state == IBV_PORT_ACTIVE;
  // Until it is up again, the GID that it had before says more of it than what is left.
  const auto found = active || !had_gid_ ? find_gid() : Result<>();
  if (active) return found;
  return fail(ErrorCode::unavailable, "rail {}: the port is {}; is its link up?", name_,
              verbs().port_state_str(port.state));
}

Result<> Device::find_gid() {
  int best = -1;
  ibv_gid_entry found{};
  for (int i = 0; i < port_.gid_tbl_len; ++i) {
    ibv_gid_entry entry{};
    if (verbs().query_gid(context_.get(), port_number_, static_cast<std::uint32_t>(i), entry) != 0) continue;
    if (wanted_gid_ && *wanted_gid_ != static_cast<std::uint32_t>(i)) continue;
    const bool same = had_gid_ && std::memcmp(entry.gid.raw, gid_.gid.raw, sizeof entry.gid.raw) == 0;
    const bool other_kind = entry.gid_type != IBV_GID_TYPE_ROCE_V2 && !wanted_gid_;
    const int worth = other_kind ? 0 : 2 * reach_of(entry.gid) + (same ? 1 : 0);
    if (worth <= best) continue;
    best = worth;
    found = entry;
  }
  if (best < 0 && wanted_gid_)
    return fail(ErrorCode::not_found,
                "rail {}: the port has no GID of index {}; 'show_gids' or 'ibv_devinfo -v' lists them", name_,
                *wanted_gid_);
  if (best <= 0 && ethernet() && !wanted_gid_)
    return fail(ErrorCode::unavailable, "rail {}: the port has no RoCE v2 GID; give its network interface an address",
                name_);
  gid_ = found;
  had_gid_ = true;
  return {};
}

bool Device::link_local() const { return is_link_local(gid_.gid); }

std::string Device::address() const {
  if (!is_ipv4(gid_.gid)) return {};
  char text[INET_ADDRSTRLEN] = {};
  return ::inet_ntop(AF_INET, gid_.gid.raw + 12, text, sizeof text) != nullptr ? text : "";
}

namespace {

constexpr int flags_of(Access access) {
  return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING |
         (allows(access, Access::remote_read) ? IBV_ACCESS_REMOTE_READ : 0) |
         (allows(access, Access::remote_write) ? IBV_ACCESS_REMOTE_WRITE : 0);
}

}  // namespace

Result<MemoryRegion> Device::register_memory(std::span<std::byte> memory, MemoryKind kind, Access access) const {
  MemoryRegion region(verbs().reg_mr(domain_.get(), memory.data(), memory.size(), flags_of(access)));
  if (region) return region;
  const int error = errno;
  if (kind == MemoryKind::cuda)
    return fail(
        ErrorCode::unreachable,
        "rail {}: {} of CUDA memory can't be registered: {}; load nvidia-peermem, or register it by its dma-buf", name_,
        human_bytes(memory.size()), std::strerror(error));
  rlimit limit{};
  if (error == ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return fail(ErrorCode::exhausted,
                "rail {}: registration of {} failed: RLIMIT_MEMLOCK is {}, for all that a process registers; raise it "
                "with 'ulimit -l unlimited'",
                name_, human_bytes(memory.size()), human_bytes(limit.rlim_cur));
  return fail(ErrorCode::exhausted, "rail {}: registration of {} failed: {}", name_, human_bytes(memory.size()),
              std::strerror(error));
}

Result<MemoryRegion> Device::register_dma_buf(const DmaBuf& buffer, Access access) const {
  MemoryRegion region(verbs().reg_dmabuf_mr(domain_.get(), buffer.offset, buffer.memory.size(),
                                            reinterpret_cast<std::uint64_t>(buffer.memory.data()), buffer.fd,
                                            flags_of(access)));
  if (region) return region;
  const int error = errno;
  return fail(
      ErrorCode::unreachable, "rail {}: a dma-buf of {} can't be registered: {}{}", name_,
      human_bytes(buffer.memory.size()), std::strerror(error),
      error == EOPNOTSUPP || error == ENOSYS || error == EPROTONOSUPPORT
          ? "; this device's driver has no dma-buf support (mlx5 has it since Linux 5.12): load nvidia-peermem, "
            "or stage through host memory"
          : "");
}

}  // namespace rejoin::transport::ibverbs
