#include "daemon/upstream.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/events.h"
#include "base/log.h"
#include "daemon/clock_stamp.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

namespace {
// A coordinator that starts again is found soon. One that shows another key, or is of another version, will be so
// again: each time it is left alone for twice as long.
constexpr auto kRetry = std::chrono::milliseconds(50), kMostRetry = std::chrono::milliseconds(5000);
}  // namespace

// One try to connect, or the pause before it. What it has asked for may answer when it is over, and its Upstream gone.
struct Upstream::Attempt {
  explicit Attempt(asio::io_context& io) : timer(io), resolver(io), socket(io) {}
  asio::steady_timer timer;
  asio::ip::tcp::resolver resolver;
  asio::ip::tcp::socket socket;
  bool resolved = false, over = false;
  void end() {
    over = true;
    asio::error_code ignored;
    timer.cancel();
    resolver.cancel();
    socket.close(ignored);
  }
};

Upstream::~Upstream() {
  if (attempt_) attempt_->end();
  if (connection_) connection_->close();
}

void Upstream::connect() {
  const auto parts = transport::SocketAddress::split(address_);
  attempt_ = std::make_shared<Attempt>(io_);
  attempt_->timer.expires_after(silence_);
  attempt_->timer.async_wait([this, attempt = attempt_](asio::error_code error) {
    if (error || attempt->over) return;
    lost(attempt->resolved ? "it does not answer" : "its name is not resolved in time");
  });
  if (!parts) return lost(parts.error().message);
  asio::error_code is_name;
  const auto address = asio::ip::make_address(parts->host, is_name);
  if (!is_name) return connect_to({{address, parts->port}});
  resolve(parts->host, std::to_string(parts->port));
}

void Upstream::resolve(std::string host, const std::string& port) {
  attempt_->resolver.async_resolve(
      host, port, asio::ip::tcp::resolver::numeric_service,
      [this, attempt = attempt_](asio::error_code error, const asio::ip::tcp::resolver::results_type& found) {
        if (attempt->over) return;
        if (error) return lost(fmt::format("address '{}': {}", address_, error.message()));
        Endpoints endpoints;
        for (const auto& one : found) endpoints.push_back(one.endpoint());
        connect_to(std::move(endpoints));
      });
}

// One that answers nothing takes all the time that a try has: the next try begins with the address behind it.
void Upstream::connect_to(Endpoints endpoints) {
  attempt_->resolved = true;
  std::rotate(endpoints.begin(), endpoints.begin() + static_cast<std::ptrdiff_t>(tries_++ % endpoints.size()),
              endpoints.end());
  const auto all = std::make_shared<const Endpoints>(std::move(endpoints));
  asio::async_connect(attempt_->socket, all->begin(), all->end(),
                      [this, attempt = attempt_, all](asio::error_code error, auto) {
                        if (attempt->over) return;
                        if (error) return lost(error.message());
                        asio::ip::tcp::socket socket = std::move(attempt->socket);
                        attempt->end();
                        attempt_.reset();
                        talk(std::move(socket));
                      });
}

void Upstream::talk(asio::ip::tcp::socket socket) {
  std::string name = name_;
  if (const auto parts = transport::SocketAddress::split(address_); name.empty() && parts) name = parts->host;
  connection_ = std::make_shared<Framed>(std::move(socket), keys_, false, name);
  connection_->start({.ready =
                          [this] {
                            up_ = true;
                            events::record(events::Kind::coordinator_up, {}, address_);
                            heard_ = false;
                            spdlog::log(
                                one_of_several_ && !logged_refused_ ? spdlog::level::debug : spdlog::level::info,
                                "connected to the coordinator at {}", address_);
                            handlers_.up();
                          },
                      .message =
                          [this](std::string_view bytes) {
                            heard_ = true;
                            logged_refused_.reset();
                            why_lost_.clear();
                            pause_ = std::chrono::milliseconds(0);
                            tries_ = 0;
                            proto::ToNode message;
                            if (message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
                              if (message.has_heartbeat()) hear_stamp(bytes);
                              return handlers_.message(message);
                            }
                            handlers_.rejected();
                            spdlog::warn("the coordinator sent bytes that are no message; ignored");
                          },
                      .closed = [this](const std::string& why) { lost(why); }},
                     silence_);
}

void Upstream::send(const proto::FromNode& message) {
  if (!connection_) return;
  std::string bytes = message.SerializeAsString();
  if (message.has_heartbeat()) stamp(bytes);
  connection_->send(bytes);
}

void Upstream::check(TimePoint heard) {
  if (up_ && SteadyClock().now() - heard > silence_) connect_anew("it was silent");
}

void Upstream::connect_anew(const std::string& why) {
  if (!connection_) return;
  connection_->close();
  lost(why);
}

nlohmann::json Upstream::status(bool connected) const {
  return {{"address", address_}, {"connected", connected}, {"reason", why_lost_}};
}

void Upstream::lost(const std::string& why) {
  if (attempt_) attempt_->end();
  // One that shows the key, and goes without a word, does not want this node: it is of another version.
  const bool refused = connection_ && (up_ ? !heard_ : connection_->refused());
  pause_ = refused ? std::min(std::max(2 * pause_, kRetry), kMostRetry) : kRetry;
  connection_.reset();
  if (std::exchange(up_, false)) events::record(events::Kind::coordinator_lost, {}, address_ + "\n" + why);
  why_lost_ = why;
  refused_ = refused;
  handlers_.down();
  if (logged_refused_ != refused) {
    if (handlers_.over()) spdlog::info("coordinator at {}: {}; the job is finished", address_, why);
    else
      spdlog::warn("coordinator at {}: {}; trying again {} {} ms", address_, why,
                   refused ? "ever less often, in the end every" : "every", (refused ? kMostRetry : kRetry).count());
    logged_refused_ = refused;
  }
  attempt_ = std::make_shared<Attempt>(io_);
  attempt_->timer.expires_after(pause_);
  attempt_->timer.async_wait([this, attempt = attempt_](asio::error_code error) {
    if (!error && !attempt->over) connect();
  });
}

}  // namespace rejoin::daemon
