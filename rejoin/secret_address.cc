#include "rejoin/secret_address.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/entropy.h"
#include "base/fail.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/socket_address.h"
#include "transport/staged/factory.h"

namespace rejoin {

namespace {

// Without an address: over both families, or, on a machine without IPv6, over IPv4.
Result<transport::Address> listen(transport::Engine& engine, const std::string& where) {
  if (!where.empty()) return engine.listen({where});
  auto listening = engine.listen({"[::]:0"});
  return listening ? listening : engine.listen({"0.0.0.0:0"});
}

// The loopback's address is told where all are here, or nobody is elsewhere, as far as can be seen.
Result<std::string> told_to_others(const transport::Address& listening, const std::string& towards) {
  if (!transport::listens_everywhere(listening)) return listening.text;
  const auto own = transport::own_hosts_towards(towards);
  const auto told = transport::with_own_host_for_any(listening, own);
  if (!transport::listens_everywhere(told)) return told.text;
  const bool none = own.v4.empty() && own.v6.empty();
  const auto there = transport::SocketAddress::split(towards);
  if ((there && transport::is_loopback({towards})) || (none && (!there || transport::SocketAddress::check_own(*there))))
    return transport::with_own_host_for_any(told, transport::or_loopback(own)).text;
  return fail(ErrorCode::unavailable,
              "it listens on {}{}, and this machine has no {}address that others could be told: give {}the address "
              "that they reach it at (advertise)",
              told.text, none ? "" : ", over IPv4 alone", none ? "" : "IPv4 ", none ? "" : "[::]:PORT (listen), or ");
}

}  // namespace

std::string SecretAddress::text(std::string_view scheme) const {
  return fmt::format("{} {:016x}{:016x} {} {}", scheme, secret[0], secret[1], family, address);
}

std::string SecretAddress::family_of(const std::string& transport) {
  std::string family = transport::family_of(transport);
  std::replace(family.begin(), family.end(), ' ', '-');
  return family;
}

Result<SecretAddress> SecretAddress::parse(std::string_view scheme, std::string_view what, const std::string& text) {
  const auto words = split(text, ' ');
  if (words.size() < 4 || words[0] != scheme || words[1].size() != 32 ||
      words[1].find_first_not_of("0123456789abcdef") != std::string::npos)
    return fail(ErrorCode::invalid_argument, "'{}' is no {}", printable(text, 200), what);
  SecretAddress parsed{.family = words[2], .address = words[3]};
  for (std::size_t i = 4; i < words.size(); ++i) parsed.address += " " + words[i];
  for (std::size_t half = 0; half < 2; ++half)
    parsed.secret[half] = std::stoull(words[1].substr(half * 16, 16), nullptr, 16);
  return parsed;
}

Result<SecretListener> SecretListener::open(const ListenConfig& config, const std::shared_ptr<device::Device>& device,
                                            const std::shared_ptr<device::Reducer>& reducer) {
  auto engine = transport::make_engine(config.transport);
  if (engine && device)
    engine = transport::staged::make_engine(std::move(*engine), device, {.exports = false}, reducer);
  if (!engine) return tl::unexpected(engine.error());
  const std::string family = SecretAddress::family_of(config.transport) + (device ? "+gpu" : "");
  const std::array<std::uint64_t, 2> secret{random_number(), random_number()};
  (*engine)->set_secrets({transport::Secret::of(secret)});
  auto listening = listen(**engine, config.listen);
  if (!listening) return tl::unexpected(listening.error());
  auto told = transport::advertised(*listening, config.advertise).and_then([&](const transport::Address& address) {
    return told_to_others(address, config.towards);
  });
  if (!told) return tl::unexpected(told.error());
  return SecretListener{.own = {.secret = secret, .family = family, .address = *told}, .engine = std::move(*engine)};
}

}  // namespace rejoin
