#include "daemon/upstream.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "daemon/listen.h"

namespace rejoin::daemon {

namespace {
// A coordinator that starts again is found soon. One that shows another key, or is of another version, will be so
// again: each time it is left alone for twice as long.
constexpr auto kRetry = std::chrono::milliseconds(50), kMostRetry = std::chrono::milliseconds(5000);
}  // namespace

Upstream::~Upstream() {
  if (connection_) connection_->close();
}

void Upstream::connect() {
  auto endpoint = endpoint_of(address_);
  if (!endpoint) return lost(endpoint.error().message);
  auto socket = std::make_shared<asio::ip::tcp::socket>(io_);
  deadline_.expires_after(silence_);
  deadline_.async_wait([socket](asio::error_code error) {
    asio::error_code ignored;
    if (!error) socket->close(ignored);
  });
  socket->async_connect(*endpoint, [this, socket](asio::error_code error) {
    if (error == asio::error::operation_aborted) return lost("it does not answer");
    deadline_.cancel();
    if (error) return lost(error.message());
    connection_ = std::make_shared<Framed>(std::move(*socket), keys_, false);
    connection_->start({.ready =
                            [this] {
                              up_ = true;
                              heard_ = false;
                              spdlog::info("connected to the coordinator at {}", address_);
                              handlers_.up();
                            },
                        .message =
                            [this](std::string_view bytes) {
                              heard_ = true;
                              logged_refused_.reset();
                              why_lost_.clear();
                              pause_ = std::chrono::milliseconds(0);
                              proto::ToNode message;
                              if (message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
                                return handlers_.message(message);
                              handlers_.rejected();
                              spdlog::warn("the coordinator sent bytes that are no message; ignored");
                            },
                        .closed = [this](const std::string& why) { lost(why); }},
                       silence_);
  });
}

void Upstream::send(const proto::FromNode& message) {
  if (connection_) connection_->send(message.SerializeAsString());
}

void Upstream::check(TimePoint heard) {
  if (!connection_ || !up_ || SteadyClock().now() - heard <= silence_) return;
  connection_->close();
  lost("it was silent");
}

nlohmann::json Upstream::status(bool connected) const {
  return {{"address", address_}, {"connected", connected}, {"reason", why_lost_}};
}

void Upstream::lost(const std::string& why) {
  // One that shows the key, and goes without a word, does not want this node: it is of another version.
  const bool refused = connection_ && (up_ ? !heard_ : connection_->refused());
  pause_ = refused ? std::min(std::max(2 * pause_, kRetry), kMostRetry) : kRetry;
  connection_.reset();
  up_ = false;
  why_lost_ = why;
  handlers_.down();
  if (logged_refused_ != refused) {
    if (handlers_.over()) spdlog::info("coordinator at {}: {}; the job is finished", address_, why);
    else
      spdlog::warn("coordinator at {}: {}; trying again {} {} ms", address_, why,
                   refused ? "ever less often, in the end every" : "every", (refused ? kMostRetry : kRetry).count());
    logged_refused_ = refused;
  }
  retry_.expires_after(pause_);
  retry_.async_wait([this](asio::error_code error) {
    if (!error) connect();
  });
}

}  // namespace rejoin::daemon
