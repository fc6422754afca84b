#include "daemon/status_fetch.h"

#include <array>
#include <asio.hpp>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/fail.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {
namespace {

constexpr std::size_t kMostOfStatus = 64 * MiB, kMostHead = 64 * KiB;  // of a status, and of what is before it
constexpr int kDeepest = 32;
constexpr auto kStatusPatience = std::chrono::seconds(5);  // with a daemon that is asked for its status

// A page's URL, as a browser has it, leads to its daemon.
std::string host_and_port(const std::string& address) {
  constexpr std::string_view scheme = "http://";
  if (!address.starts_with(scheme)) return address;
  return address.substr(scheme.size(), address.find('/', scheme.size()) - scheme.size());
}

}  // namespace

Result<nlohmann::json> fetch_status(const std::string& address, Texts texts) {
  const auto where = transport::SocketAddress::split(host_and_port(address));
  if (!where) return tl::unexpected(where.error());
  asio::ip::tcp::iostream stream;
  stream.expires_after(kStatusPatience);
  stream.connect(where->host, std::to_string(where->port));
  if (!stream)
    return fail(ErrorCode::unavailable,
                "no daemon answers at {}: {}; its --status address is in its log and --address-file", address,
                stream.error().message());
  stream << "GET /status HTTP/1.1\r\nHost: rejoin\r\nConnection: close\r\n\r\n" << std::flush;
  constexpr std::string_view end = "\r\n\r\n";  // of the head
  std::string body;
  std::array<char, 65536> part{};
  bool begun = false;
  while (body.size() <= (begun ? kMostOfStatus : kMostHead) &&
         (stream.read(part.data(), part.size()), stream.gcount() > 0)) {
    body.append(part.data(), static_cast<std::size_t>(stream.gcount()));
    if (const auto at = begun ? body.npos : body.find(end); at != body.npos) {
      begun = true;
      body.erase(0, at + end.size());
    }
  }
  if (stream.error() == asio::error::timed_out)
    return fail(ErrorCode::timeout,
                "{} accepted the connection and did not answer in {} s; its daemon may be stopped or overloaded",
                address, kStatusPatience.count());
  // What is nested too deeply is left out: writing it would take a call for each level. Who has the port may be
  // anybody.
  const auto keep = [texts](int depth, auto, auto& value) {
    if (auto* text = value.template get_ptr<std::string*>(); text != nullptr && texts == Texts::printable)
      *text = printable(*text, text->size());
    return depth <= kDeepest;
  };
  auto json = body.size() > kMostOfStatus || !begun ? nlohmann::json(nlohmann::json::value_t::discarded)
                                                    : nlohmann::json::parse(body, keep, false);
  if (json.is_discarded())
    return fail(ErrorCode::corrupt,
                "what answers at {} is not a Rejoin daemon; give a daemon's --status address, not its --listen",
                address);
  return json;
}

}  // namespace rejoin::daemon
