#include "transport/factory.h"

#include <algorithm>

#include "base/fail.h"
#include "transport/ibverbs/factory.h"
#include "transport/placement.h"
#include "transport/shm/factory.h"
#include "transport/staged/factory.h"
#include "transport/striped/factory.h"
#include "transport/tcp/factory.h"
#include "transport/ucx/factory.h"

namespace rejoin::transport {

namespace {

constexpr std::string_view kTcp = "tcp", kEncrypted = "tcp+aes";

// "tcp…" without its settings, which are behind it.
std::string plain(const std::string& name) { return name.substr(0, name.find(';')); }
std::string kind_of(const std::string& name) { return plain(name).substr(0, name.find(':')); }
bool is_tcp(const std::string& name) { return kind_of(name) == kTcp || kind_of(name) == kEncrypted; }

Result<> check_tcp(const std::string& name) {
  const std::string kind = kind_of(name), whole = plain(name), settings = name.substr(whole.size());
  const bool known = settings == ";ktls=0" || settings == ";ktls=1";
  if (!settings.empty() && (kind != kEncrypted || !known))
    return fail(ErrorCode::invalid_argument,
                "transport '{}': '{}' is no setting of {}; the only one is ktls, of {}: {};ktls=1 or {};ktls=0", name,
                settings, kind, kEncrypted, kEncrypted, kEncrypted);
  if (whole == kind) return {};
  for (const auto& local : split(whole.substr(kind.size() + 1), ','))
    if (local.empty())
      return fail(ErrorCode::invalid_argument,
                  "transport '{}': an address is missing; use {}:ADDRESS,ADDRESS…, or {} for any", name, kind, kind);
  return {};
}

template <typename MakeRail>
Result<std::unique_ptr<Engine>> over_rails(const std::vector<std::string>& names, MakeRail make_rail) {
  static const SteadyClock clock;
  std::vector<std::unique_ptr<Engine>> rails;
  for (const auto& name : names) {
    Result<std::unique_ptr<Engine>> rail = make_rail(name);
    if (!rail) return rail;
    rails.push_back(std::move(*rail));
  }
  if (rails.size() == 1) return std::move(rails[0]);
  return striped::make_engine(std::move(rails), {}, clock);
}

// `device`: for whose memory, where that is known.
Result<std::unique_ptr<Engine>> ibverbs_over_rails(const std::string& list, const std::string& device) {
  if (auto there = ibverbs::available(); !there) return tl::unexpected(there.error());
  const bool near = list == kNear;
  std::vector<std::string> names = list.empty() || near ? ibverbs::active_ports() : split(list, ',');
  if (near) names = nearest_ports(names, device);
  if (names.empty())
    return fail(ErrorCode::unavailable,
                "no RDMA port is active here; 'ibv_devinfo' shows what there is. Without RDMA use shm or tcp");
  return over_rails(names, [](const std::string& name) -> Result<std::unique_ptr<Engine>> {
    auto options = ibverbs::parse_options(name);
    if (!options) return tl::unexpected(options.error());
    return ibverbs::make_engine(*options);
  });
}

}  // namespace

std::string family_of(const std::string& name) {
  if (!is_tcp(name)) return name.substr(0, name.find(':'));
  const auto rails = 1 + std::count(name.begin(), name.end(), ',');
  return rails > 1 ? fmt::format("{} over {} rails", kind_of(name), rails) : kind_of(name);
}

Result<> check_name(const std::string& name) {
  if (is_tcp(name)) return check_tcp(name);
  if (name == "ibverbs" || name.starts_with("ibverbs:") || name == "shm" || name.starts_with("ucx:")) return {};
  return fail(ErrorCode::invalid_argument,
              "no transport '{}': use shm, tcp, tcp:ADDRESS,ADDRESS…, tcp+aes (encrypted, with or without addresses), "
              "ibverbs, ibverbs:DEVICE,DEVICE… or ucx:LIST",
              name);
}

namespace {

Result<std::unique_ptr<Engine>> make_rails(const std::string& name, const std::string& device) {
  if (auto right = check_name(name); !right) return tl::unexpected(right.error());
  if (is_tcp(name)) {
    const std::string kind = kind_of(name), whole = plain(name);
    const auto rail = [&](const std::string& local) {
      return tcp::make_engine({.local = local, .encrypt = kind == kEncrypted, .kernel = name.ends_with(";ktls=1")});
    };
    return whole == kind ? rail("") : over_rails(split(whole.substr(kind.size() + 1), ','), rail);
  }
  if (name == "ibverbs") return ibverbs_over_rails("", device);
  if (name.starts_with("ibverbs:")) return ibverbs_over_rails(name.substr(8), device);
  if (name == "shm") return shm::make_engine();
  return ucx::make_engine({.transports = name.substr(4)});
}

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(const std::string& name) { return make_rails(name, ""); }

Result<std::unique_ptr<Engine>> make_engine(const std::string& name, const std::shared_ptr<device::Device>& device,
                                            const std::shared_ptr<device::Reducer>& reducer) {
  auto engine = make_rails(name, device->address());
  if (!engine || device->kind() == MemoryKind::host) return engine;
  return staged::make_engine(std::move(*engine), device, {}, reducer);
}

}  // namespace rejoin::transport
