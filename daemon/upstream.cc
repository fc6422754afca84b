#include "daemon/upstream.h"

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/entropy.h"
#include "base/events.h"
#include "base/log.h"
#include "base/refusals.h"
#include "base/release.h"
#include "daemon/clock_stamp.h"
#include "daemon/listen.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

namespace {
// A coordinator that starts again is found soon. One that shows another key, or is of another version, will be so
// again: each time it is left alone for twice as long.
constexpr std::size_t kLongestWhy = 400;
constexpr std::size_t kMostTried = 64;
constexpr auto kHeadStart = std::chrono::milliseconds(250);
constexpr auto kRetry = std::chrono::milliseconds(50), kMostRetry = std::chrono::milliseconds(5000);
}  // namespace

// One try to connect, to one address after the other, or the pause before it. What it has asked for may answer when it
// is over, and its Upstream gone.
struct Upstream::Attempt {
  explicit Attempt(asio::io_context& io) : timer(io), head_start(io) {}
  asio::steady_timer timer, head_start;
  Resolver::Endpoints endpoints;
  std::deque<asio::ip::tcp::socket> sockets;  // of those that have been called, in their order
  std::size_t unanswered = 0;
  bool resolved = false, over = false;
  void end() {
    over = true;
    asio::error_code ignored;
    timer.cancel();
    head_start.cancel();
    for (auto& socket : sockets) socket.close(ignored);
  }
};

Upstream::~Upstream() {
  end_attempt();
  if (connection_) connection_->close();
}

void Upstream::end_attempt() {
  elsewhere_ = false;
  if (const auto attempt = std::exchange(attempt_, nullptr)) attempt->end();
  if (const auto next = std::exchange(next_, nullptr)) next->close();
}

void Upstream::connect() {
  const auto parts = transport::SocketAddress::split(address_);
  attempt_ = std::make_shared<Attempt>(io_);
  limit_time();
  if (!parts) return not_connected(parts.error().message);
  asio::error_code is_name;
  const auto address = asio::ip::make_address(parts->host, is_name);
  if (!is_name) return connect_to({{address, parts->port}});
  resolve(parts->host, parts->port);
}

void Upstream::limit_time() {
  attempt_->timer.expires_after(silence_);
  attempt_->timer.async_wait([this, attempt = attempt_](asio::error_code error) {
    if (error || attempt->over) return;
    not_connected(attempt->resolved ? "it does not answer" : "its name is not resolved in time");
  });
}

// However long it took, there is as much time to connect as where the address is known.
void Upstream::resolve(const std::string& host, std::uint16_t port) {
  resolver_.ask(host, port, [this, attempt = attempt_](Result<Resolver::Endpoints> found) {
    if (attempt->over) return;
    if (!found) return not_connected(found.error().message);
    limit_time();
    connect_to(std::move(*found));
  });
}

// The one that was heard last comes first. One that takes the call and says nothing takes all the time that a try has:
// the next try begins with the address behind it.
void Upstream::connect_to(Resolver::Endpoints endpoints) {
  attempt_->resolved = true;
  if (elsewhere_) return call_others(std::move(endpoints));
  if (const auto heard = std::ranges::find(endpoints, heard_at_); heard != endpoints.end())
    std::rotate(endpoints.begin(), heard, heard + 1);
  std::rotate(endpoints.begin(), endpoints.begin() + static_cast<std::ptrdiff_t>(tries_++ % endpoints.size()),
              endpoints.end());
  attempt_->endpoints = std::move(endpoints);
  call_next();
}

// Those come first that were not tried yet, and then those whose try is longest ago, in whatever order the name server
// tells them.
void Upstream::call_others(Resolver::Endpoints endpoints) {
  note_tried(called_);
  std::erase(endpoints, called_);
  if (endpoints.empty()) return end_attempt();
  std::ranges::stable_sort(endpoints, {}, [this](const auto& one) {
    const auto tried = std::ranges::find(tried_, one);
    return tried == tried_.end() ? 0 : tried - tried_.begin() + 1;
  });
  attempt_->endpoints = std::move(endpoints);
  call_next();
}

void Upstream::note_tried(const asio::ip::tcp::endpoint& one) {
  std::erase(tried_, one);
  if (tried_.size() == kMostTried) tried_.erase(tried_.begin());
  tried_.push_back(one);
}

// One that answers nothing must not cost this node its place: it has a head start before the next one is called, and
// whoever answers first is taken (RFC 8305). Nor must a call that is lost, which the system would repeat after 1, 3 and
// 7 s: when all have been called, each is called once more beside that, and so on.
void Upstream::call_next() {
  Attempt& attempt = *attempt_;
  const auto endpoint = attempt.endpoints[attempt.sockets.size() % attempt.endpoints.size()];
  auto& socket = attempt.sockets.emplace_back(io_);
  ++attempt.unanswered;
  socket.async_connect(endpoint, [this, attempt = attempt_, &socket, endpoint](asio::error_code error) {
    if (attempt->over) return;
    --attempt->unanswered;
    if (!error) {
      asio::ip::tcp::socket taken = std::move(socket);
      attempt->end();
      attempt_.reset();
      return talk(std::move(taken), endpoint);
    }
    if (attempt->sockets.size() < attempt->endpoints.size()) return call_next();
    if (attempt->unanswered == 0) not_connected(error.message());
  });
  const Duration each = deadlines::kAllAddresses.of(silence_) / static_cast<std::int64_t>(attempt.endpoints.size());
  const bool first_round = attempt.sockets.size() < attempt.endpoints.size();
  attempt.head_start.expires_after(first_round ? std::min<Duration>(each, kHeadStart)
                                               : deadlines::kCallAgain.of(silence_));
  // One that has expired before it is set anew comes all the same.
  attempt.head_start.async_wait([this, attempt = attempt_, called = attempt.sockets.size()](asio::error_code error) {
    if (!error && !attempt->over && attempt->sockets.size() == called) call_next();
  });
}

void Upstream::talk(asio::ip::tcp::socket socket, const asio::ip::tcp::endpoint& called) {
  if (elsewhere_) note_tried(called);
  std::string name = name_;
  if (const auto parts = transport::SocketAddress::split(address_); name.empty() && parts) name = parts->host;
  asio::error_code gone;  // then it ends at once
  const Ends ends{text_of(socket.local_endpoint(gone)), text_of(socket.remote_endpoint(gone))};
  next_ = std::make_shared<Framed>(std::move(socket), keys_, false, name);
  next_->start({.ready = [this, ends, called] { on_up(ends, called); },
                .message = [this](std::string_view bytes) { on_bytes(bytes); },
                .closed =
                    [this, which = next_.get()](const std::string& why) {
                      if (which != connection_.get()) return not_connected(why);
                      lost(heard_ ? why : without_a_word(why));
                    }},
               silence_);
}

// Where it takes another one's place, what is still to come over that one is not heard: all is said again over this.
void Upstream::on_up(const Ends& ends, const asio::ip::tcp::endpoint& called) {
  const auto silent = std::exchange(connection_, std::exchange(next_, nullptr));
  const TimePoint now = SteadyClock().now();
  const bool elsewhere = std::exchange(elsewhere_, false);
  if (std::exchange(up_, false)) {
    silent->close();
    const auto why = elsewhere
                         ? fmt::format("it does not lead at {}, and has answered at {}", ends_.there, ends.there)
                         : fmt::format("nothing {} for {:.0f} ms, and another connection is up",
                                       last_heard_ < got_through_ ? "was heard" : "that is sent has been acknowledged",
                                       milliseconds(now - std::min(last_heard_, got_through_)));
    events::record(events::Kind::coordinator_lost, {}, address_ + "\n" + why);
    spdlog::log(elsewhere ? spdlog::level::debug : spdlog::level::warn, "coordinator at {}: {}", address_, why);
    handlers_.down();
  }
  up_ = true;
  events::record(events::Kind::coordinator_up, {}, address_);
  ends_ = ends;
  called_ = called;
  heard_ = false;
  last_heard_ = got_through_ = now;
  their_silence_ = silence_;
  apart_ = Duration(random_number() % static_cast<std::uint64_t>((silence_ / 16 + Duration(1)).count()));
  spoken_ = membership::Spoken();
  release_.clear();
  spdlog::log((one_of_several_ || elsewhere) && !logged_refused_ ? spdlog::level::debug : spdlog::level::info,
              "connected to the coordinator at {}", address_);
  handlers_.up();
}

void Upstream::on_bytes(std::string_view bytes) {
  proto::ToNode message;
  const bool sound = message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (sound && message.has_welcome() && !message.welcome().refusal().empty()) return on_refusal(message.welcome());
  heard_ = true;
  last_heard_ = SteadyClock().now();
  // It may have been on its way since before an outage that keeps back what is said here.
  if ((attempt_ || next_) && !elsewhere_ && !connection_->repeats()) end_attempt();
  refusal_.clear();
  logged_refused_.reset();
  why_lost_.clear();
  pause_ = std::chrono::milliseconds(0);
  tries_ = 0;
  heard_at_ = called_;
  if (!sound) {
    handlers_.rejected();
    refusals::count(refusals::Why::protocol);
    return spdlog::warn("the coordinator sent bytes that are no message; ignored");
  }
  if (message.has_heartbeat()) hear_stamp(bytes);
  if (message.has_welcome()) on_welcome(message.welcome());
  handlers_.message(message);
}

// It comes before anything else. The connection is closed here, and made anew as one is that another key was shown on.
void Upstream::on_refusal(const proto::NodeWelcome& welcome) {
  refusal_ = fmt::format("it refuses this node: {}", printable(welcome.refusal(), kLongestWhy));
  connection_->close();
  lost(refusal_);
}

void Upstream::on_welcome(const proto::NodeWelcome& welcome) {
  constexpr std::size_t longest = 32;
  spoken_ = membership::Spoken::with({welcome.oldest(), welcome.newest()});
  release_ = printable(welcome.release(), longest);
  if (welcome.silence_ms() != 0)
    their_silence_ = std::min<Duration>(silence_, std::chrono::milliseconds(welcome.silence_ms()));
  if (release_ != release() || spoken_.version() != membership::kProtocolVersion)
    spdlog::info("the coordinator at {} is of release {}, this rejoind of {}; they speak protocol {}", address_,
                 release_, release(), spoken_.version());
}

void Upstream::finish(std::function<void()> over) {
  if (!up_) return asio::post(io_, std::move(over));
  end_attempt();
  finished_ = std::move(over);
  connection_->finish([this] { lost("finished"); });
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

// Whoever is stopped, or has much to do, acknowledges all the same, and is called later: its answer may be on its way.
void Upstream::tick(TimePoint now) {
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{})
    for (auto* since : {&last_heard_, &got_through_}) membership::forgive(*since, pause, now);
  if (!up_ || !connection_->repeats()) got_through_ = now;
  if (!up_ || finished_ || attempt_ || next_ || pause_detector_.settling(now)) return;
  const bool acknowledges =
      connection_->unacknowledged_for() <= deadlines::kHeartbeatOfDaemon.of(their_silence_) * 3 / 2;
  const auto patience = (acknowledges ? deadlines::kUnheard : deadlines::kForgotten).of(their_silence_) + apart_;
  const bool stuck = now - got_through_ > deadlines::kRepeated.of(their_silence_) + apart_;
  if (stuck || now - last_heard_ > patience) connect();
}

void Upstream::look_elsewhere() {
  if (!up_ || finished_ || attempt_ || next_) return;
  elsewhere_ = true;
  connect();
}

void Upstream::stay() {
  if (elsewhere_) end_attempt();
}

void Upstream::connect_anew(const std::string& why) {
  if (!up_) return;
  connection_->close();
  lost(why);
}

nlohmann::json Upstream::status(bool connected) const {
  nlohmann::json json{{"address", address_}, {"connected", connected}, {"reason", why_lost_}};
  if (!up_ || !heard_) return json;
  json["protocol"] = spoken_.version();
  json["release"] = release_;
  return json;
}

// Those of before 16 refuse another version so.
std::string Upstream::without_a_word(const std::string& why) {
  return fmt::format(
      "{} without a word; if it does so again, it speaks none of this node's protocols, {}: upgrade it first, to a "
      "release that speaks protocol {}",
      why, membership::Versions{}.text(), membership::kOldestProtocol);
}

// The one that was up. Another one may be on its way already.
void Upstream::lost(const std::string& why) {
  if (finished_) return std::exchange(finished_, nullptr)();
  connection_.reset();
  up_ = elsewhere_ = false;
  events::record(events::Kind::coordinator_lost, {}, address_ + "\n" + why);
  // One that shows the key, and goes without a word, does not want this node.
  tell_that_it_is_not_connected(why, !heard_);
  if (!attempt_ && !next_) try_again(!heard_);
}

// A try has led to nothing. Beside a connection that is up it is nobody's loss.
void Upstream::not_connected(const std::string& why) {
  // Where something else listens, its answer does not always come before its end.
  const bool refused = next_ && (next_->refused() || (refused_ && !up_));
  const bool elsewhere = elsewhere_;
  end_attempt();
  if (elsewhere) return spdlog::debug("coordinator at {}: none at another address of that name: {}", address_, why);
  if (up_) spdlog::debug("coordinator at {}: no connection beside the one that is silent: {}", address_, why);
  else tell_that_it_is_not_connected(why, refused);
  try_again(refused);
}

void Upstream::tell_that_it_is_not_connected(const std::string& why, bool refused) {
  why_lost_ = why;
  refused_ = refused;
  handlers_.down();
  if (logged_refused_ == refused) return;
  logged_refused_ = refused;
  if (handlers_.over()) spdlog::info("coordinator at {}: {}; the job is finished", address_, why);
  else
    spdlog::warn("coordinator at {}: {}; trying again {} {} ms", address_, why,
                 refused ? "ever less often, in the end every" : "every", (refused ? kMostRetry : kRetry).count());
}

void Upstream::try_again(bool refused) {
  pause_ = refused ? std::min(std::max(2 * pause_, kRetry), kMostRetry) : kRetry;
  attempt_ = std::make_shared<Attempt>(io_);
  attempt_->timer.expires_after(pause_);
  attempt_->timer.async_wait([this, attempt = attempt_](asio::error_code error) {
    if (!error && !attempt->over) connect();
  });
}

}  // namespace rejoin::daemon
