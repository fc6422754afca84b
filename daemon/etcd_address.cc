#include "daemon/etcd_address.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/number.h"

namespace rejoin::daemon::etcd_client {

namespace {

// One target has one family. Where there are both, an IPv4 address is written as an IPv6 one (::ffff:10.0.0.1), as gRPC
// itself does before it connects. A target is a URI, in which brackets and a zone's % are to be escaped.
std::string target_of(const Resolver::Endpoints& endpoints) {
  const bool four = std::ranges::all_of(endpoints, [](const auto& one) { return one.address().is_v4(); });
  std::string target = four ? "ipv4:" : "ipv6:";
  for (const auto& one : endpoints) {
    if (target.back() != ':') target += ',';
    if (four) {
      target += fmt::format("{}:{}", one.address().to_string(), one.port());
      continue;
    }
    const auto address = one.address().is_v6() ? one.address().to_v6()
                                               : asio::ip::make_address_v6(asio::ip::v4_mapped, one.address().to_v4());
    std::string text = address.to_string();
    if (const auto zone = text.find('%'); zone != text.npos) text.replace(zone, 1, "%25");
    target += fmt::format("%5B{}%5D:{}", text, one.port());
  }
  return target;
}

}  // namespace

Address::Address(asio::io_context& io, const std::string& endpoint) : resolver_(io) {
  const auto colon = endpoint.rfind(':');
  host_ = endpoint.substr(0, colon);
  (void)parse_number(std::string_view(endpoint).substr(colon + 1), port_);  // which check() has seen to
  if (host_.starts_with('[')) host_ = host_.substr(1, host_.size() - 2);
  asio::error_code error;
  const auto address = asio::ip::make_address(host_, error);
  has_name_ = static_cast<bool>(error);
  if (!has_name_) target_ = target_of({{address, port_}}), count_ = 1;
}

void Address::ask(std::function<void(Result<>)> done) {
  resolver_.ask(host_, port_, [this, done = std::move(done)](const Result<Resolver::Endpoints>& found) {
    if (found) target_ = target_of(*found), count_ = found->size();
    done(found ? Result<>() : tl::unexpected(found.error()));
  });
}

}  // namespace rejoin::daemon::etcd_client
