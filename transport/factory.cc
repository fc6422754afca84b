#include "transport/factory.h"

#include <algorithm>
#include <set>

#include "base/fail.h"
#include "base/log.h"
#include "base/number.h"
#include "transport/ibverbs/factory.h"
#include "transport/lone/factory.h"
#include "transport/placement.h"
#include "transport/shm/factory.h"
#include "transport/staged/factory.h"
#include "transport/striped/factory.h"
#include "transport/tcp/factory.h"
#include "transport/threaded/factory.h"
#include "transport/ucx/factory.h"

namespace rejoin::transport {

namespace {

constexpr std::string_view kTcp = "tcp", kEncrypted = "tcp+aes", kThreads = "threads=";

std::string kind_of(const std::string& name) { return name.substr(0, name.find_first_of(":;")); }
bool is_tcp(const std::string& name) { return kind_of(name) == kTcp || kind_of(name) == kEncrypted; }

// "tcp", "tcp+aes": with ":ADDRESS,ADDRESS…" and ";setting=value;…" behind it.
struct Tcp {
  std::string kind;
  std::vector<std::string> locals{""};
  bool by_kernel = false;
  std::size_t threads = 0;
  std::size_t rails() const { return locals.size() * (1 + threads); }
};

Result<Tcp> parse_tcp(const std::string& name) {
  const auto parts = split(name, ';');
  Tcp tcp{.kind = kind_of(name)};
  if (parts[0] != tcp.kind) tcp.locals = split(parts[0].substr(tcp.kind.size() + 1), ',');
  if (parts[0] != tcp.kind && std::ranges::count(tcp.locals, "") > 0)
    return fail(ErrorCode::invalid_argument,
                "transport '{}': an address is missing; use {}:ADDRESS,ADDRESS…, or {} for any", name, tcp.kind,
                tcp.kind);
  std::set<std::string> given;
  for (const auto& setting : std::span(parts).subspan(1)) {
    if (const auto what = setting.substr(0, setting.find('=')); !given.insert(what).second)
      return fail(ErrorCode::invalid_argument, "transport '{}' has '{}' twice: give it once", name, what);
    const auto threads = std::string_view(setting).substr(std::min<std::size_t>(setting.size(), kThreads.size()));
    if (tcp.kind == kEncrypted && (setting == "ktls=0" || setting == "ktls=1")) tcp.by_kernel = setting == "ktls=1";
    else if (!setting.starts_with(kThreads) || !parse_number(threads, tcp.threads))
      return fail(ErrorCode::invalid_argument,
                  "transport '{}': '{}' is no setting of {}; there are threads=N, and of {} ktls=1 or ktls=0", name,
                  setting, tcp.kind, kEncrypted);
  }
  if (tcp.threads > striped::kMaxRails || tcp.rails() > striped::kMaxRails)
    return fail(ErrorCode::invalid_argument,
                "transport '{}': each address has one connection, and one more for each thread; they must not be more "
                "than {}",
                name, striped::kMaxRails);
  return tcp;
}

// `make_rail`: of a rail's number.
template <typename MakeRail>
Result<std::unique_ptr<Engine>> over_rails(std::size_t count, MakeRail make_rail,
                                           const striped::Options& options = {}) {
  static const SteadyClock clock;
  std::vector<std::unique_ptr<Engine>> rails;
  for (std::size_t number = 0; number < count; ++number) {
    Result<std::unique_ptr<Engine>> rail = make_rail(number);
    if (!rail) return rail;
    rails.push_back(std::move(*rail));
  }
  if (rails.size() == 1) return lone::make_engine(std::move(rails[0]));
  return striped::make_engine(std::move(rails), options, clock);
}

// Of each address one connection is the caller's thread's, for messages, for what is small, and for its share of bulk.
Result<std::unique_ptr<Engine>> tcp_over_rails(const Tcp& tcp) {
  const std::size_t addresses = tcp.locals.size();
  const auto rail = [&](std::size_t number) -> Result<std::unique_ptr<Engine>> {
    auto engine = tcp::make_engine({.local = tcp.locals[number % addresses],
                                    .one_of_several = addresses > 1,
                                    .encrypt = tcp.kind == kEncrypted,
                                    .kernel = tcp.by_kernel});
    return engine && number >= addresses ? threaded::make_engine(std::move(*engine)) : std::move(engine);
  };
  return over_rails(tcp.rails(), rail, {.first_bulk_rail = addresses});
}

// `device`: for whose memory, where that is known.
Result<std::unique_ptr<Engine>> ibverbs_over_rails(const std::string& list, const std::string& device) {
  if (auto there = ibverbs::available(); !there) return tl::unexpected(there.error());
  const bool near = list == kNear;
  const ibverbs::Ports found = list.empty() || near ? ibverbs::find_ports() : ibverbs::Ports{};
  std::vector<std::string> names = list.empty() || near ? found.names : split(list, ',');
  for (const auto& one : found.left_out) logger().info("ibverbs: no rail is made of {}", one);
  if (near) names = nearest_ports(names, device);
  if (names.empty())
    return fail(ErrorCode::unavailable,
                "no RDMA port is active here{}; 'ibv_devinfo' shows what there is. Without RDMA use shm or tcp",
                found.left_out.empty() ? "" : fmt::format(", but {}", fmt::join(found.left_out, "; ")));
  return over_rails(names.size(), [&](std::size_t number) -> Result<std::unique_ptr<Engine>> {
    auto options = ibverbs::parse_options(names[number]);
    if (!options) return tl::unexpected(options.error());
    options->one_of_several = names.size() > 1;
    return ibverbs::make_engine(*options);
  });
}

}  // namespace

std::string family_of(const std::string& name) {
  if (!is_tcp(name)) return name.substr(0, name.find(':'));
  const auto tcp = parse_tcp(name);
  return tcp && tcp->rails() > 1 ? fmt::format("{} over {} rails", tcp->kind, tcp->rails()) : kind_of(name);
}

std::size_t rails_of(const std::string& name) {
  const auto tcp = is_tcp(name) ? parse_tcp(name) : Result<Tcp>();
  return is_tcp(name) && tcp ? tcp->rails() : static_cast<std::size_t>(1 + std::ranges::count(name, ','));
}

Result<> check_name(const std::string& name) {
  if (is_tcp(name)) {
    const auto tcp = parse_tcp(name);
    return tcp ? Result<>() : tl::unexpected(tcp.error());
  }
  if (const std::string verbs = "ibverbs:"; name.starts_with(verbs)) {
    for (const auto& rail : split(name.substr(verbs.size()), ','))
      if (auto options = ibverbs::parse_options(rail); !options) return tl::unexpected(options.error());
    return {};
  }
  if (name == "ibverbs" || name == "shm" || name.starts_with("ucx:")) return {};
  return fail(ErrorCode::invalid_argument,
              "no transport '{}': use shm, tcp, tcp:ADDRESS,ADDRESS…, tcp+aes (encrypted, with or without addresses), "
              "ibverbs, ibverbs:DEVICE,DEVICE… or ucx:LIST",
              name);
}

namespace {

Result<std::unique_ptr<Engine>> make_rails(const std::string& name, const std::string& device) {
  if (auto right = check_name(name); !right) return tl::unexpected(right.error());
  if (is_tcp(name)) return tcp_over_rails(*parse_tcp(name));
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
