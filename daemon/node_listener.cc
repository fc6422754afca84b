#include "daemon/node_listener.h"

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/clock_stamp.h"
#include "daemon/listen.h"
#include "membership/greeting.h"

namespace rejoin::daemon {

using membership::NodeId;

namespace {

constexpr std::size_t kMostStrangers = 256;
constexpr std::size_t kLongestUnreached = 1200;
constexpr std::size_t kMostHosts = 256;  // of which it is known when a refusal was logged last

// Of "address:port". Of IPv6 a whole network of 64 bits: whoever has one address there has them all.
std::string host_of(const std::string& remote) {
  std::string host = remote.substr(0, remote.rfind(':'));
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  asio::error_code not_ipv6;
  const auto address = asio::ip::make_address_v6(host, not_ipv6);
  if (not_ipv6 || address.is_v4_mapped()) return host;
  return asio::ip::make_network_v6(address, 64).canonical().to_string();
}

// Texts that a node says go into logs, and to people's terminals.
void make_printable(proto::FromNode& message) {
  constexpr std::size_t longest_name = 255;
  const auto whole = [](const std::string& text) { return printable(text, text.size()); };
  if (message.has_hello()) message.mutable_hello()->set_node(printable(message.hello().node(), longest_name));
  if (auto* up = message.has_rank_up() ? message.mutable_rank_up() : nullptr; up != nullptr) {
    up->set_node(printable(up->node(), longest_name));
    up->set_settings(whole(up->settings()));
    up->set_stream_address(whole(up->stream_address()));
  }
  if (message.has_report()) {
    message.mutable_report()->set_node(printable(message.report().node(), longest_name));
    message.mutable_report()->set_unreached(printable(message.report().unreached(), kLongestUnreached));
  }
  if (message.has_replica_status())
    for (auto& peer : *message.mutable_replica_status()->mutable_unreached()) peer.set_why(whole(peer.why()));
  if (message.has_rank_down()) message.mutable_rank_down()->set_reason(whole(message.rank_down().reason()));
  if (message.has_accusation()) message.mutable_accusation()->set_what(whole(message.accusation().what()));
  if (message.has_drift()) message.mutable_drift()->set_tensor(whole(message.drift().tensor()));
}

}  // namespace

Result<> NodeListener::listen(const std::string& where) {
  auto address = listen_on(acceptor_, where);
  if (!address) return tl::unexpected(address.error());
  address_ = *address;
  accept();
  return {};
}

NodeListener::~NodeListener() {
  close_all();
  for (auto& [id, stranger] : std::exchange(strangers_, {})) stranger->close();
}

void NodeListener::accept() {
  acceptor_.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error) greet(std::move(socket));
    if (!without_descriptors(error)) return accept();
    if (without_descriptors_.may_say(SteadyClock().now()))
      spdlog::warn("no control connection can be accepted: {}; raise the limit with 'ulimit -n'", error.message());
    again_.expires_after(kWithoutDescriptors);
    again_.async_wait([this](asio::error_code cancelled) {
      if (!cancelled) accept();
    });
  });
}

// A stranger, until it has proven the job key: few of them at a time, and none for long.
void NodeListener::greet(asio::ip::tcp::socket socket) {
  auto connection = std::make_shared<Framed>(std::move(socket), keys_, true);
  const NodeId id(next_node_++);
  strangers_.emplace(id, connection);
  make_room();
  connection->start({.ready = [this, id] { nodes_[id].connection = strangers_.extract(id).mapped(); },
                     .message = [this, id](std::string_view bytes) { on_bytes(id, bytes); },
                     .closed =
                         [this, id](const std::string& why) {
                           if (const auto stranger = strangers_.extract(id); !stranger.empty())
                             return never_a_node(*stranger.mapped(), why);
                           const auto gone = nodes_.extract(id);
                           if (gone.empty()) return;
                           spdlog::info("node {} at {} is gone: {}", gone.mapped().name,
                                        gone.mapped().connection->remote(), why);
                           events::record(events::Kind::node_lost, {}, gone.mapped().name + "\n" + why);
                           lose(id);
                         }},
                    proof_deadline());
}

// A message may end its connection. Whoever sends has others to send, of one decision, and what follows from this end
// goes out behind them.
void NodeListener::lose(NodeId node) {
  if (!sending_) return handlers_.lost(node);
  ended_by_send_.insert(node);
  asio::post(acceptor_.get_executor(), [this, node, there = std::weak_ptr(there_)] {
    if (!there.expired() && ended_by_send_.erase(node) > 0) handlers_.lost(node);
  });
}

std::chrono::milliseconds NodeListener::proof_deadline() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(deadlines::kControlProof.of(silence_));
}

// An honest one needs two round trips, and only a flood that is faster than these displaces it; it comes again.
void NodeListener::make_room() {
  if (strangers_.size() <= kMostStrangers) return;
  const auto oldest = strangers_.begin()->second;
  oldest->refuse(refusals::Why::too_many, "too many come at once that have not proven the job key");
}

// One that gave up while this process was stopped was refused nothing.
void NodeListener::never_a_node(const Framed& connection, const std::string& why) {
  const std::string remote = connection.remote();
  if (!connection.refused()) return spdlog::debug("a connection from {} ended before its proof: {}", remote, why);
  log_refusal(spdlog::level::warn, remote, fmt::format("a connection from {} was refused: {}", remote, why));
}

// A daemon with a wrong key or of another version, or a port scanner, comes again and again.
void NodeListener::log_refusal(spdlog::level::level_enum level, const std::string& remote, const std::string& line) {
  ++rejected_;
  const TimePoint now = SteadyClock().now();
  const std::string host = host_of(remote);
  const bool full = refusals_.size() >= kMostHosts && !refusals_.contains(host);
  if (full) std::erase_if(refusals_, [&](const auto& one) { return one.second.is_over(now); });
  const bool shares = full && refusals_.size() >= kMostHosts;
  auto& lines = shares ? other_hosts_ : refusals_.try_emplace(host, kRefusalsApart).first->second;
  if (const auto left_out = lines.may_say(now))
    spdlog::log(level, "{}{}", line,
                *left_out == 0 ? ""
                               : fmt::format(" ({} more from {} since the last such line)", *left_out,
                                             shares ? "other hosts" : "there"));
}

void NodeListener::on_bytes(NodeId node, std::string_view bytes) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return;
  const auto connection = found->second.connection;
  proto::FromNode message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    spdlog::warn("node {}: bytes that are no message; ignored", connection->remote());
    ++rejected_;
    refusals::count(refusals::Why::protocol);
    return;
  }
  make_printable(message);
  if (message.has_hello()) {
    const auto greeting = membership::greet(message.hello(), connection->remote(), silence_, handlers_.takes_relays);
    if (!greeting.spoken) {
      refusals::count(greeting.misplaced ? refusals::Why::job : refusals::Why::version);
      log_refusal(spdlog::level::err, connection->remote(), greeting.refusal);
      nodes_.erase(found);
      if (!greeting.answer) return connection->close();
      return connection->send_last(greeting.answer->SerializeAsString(), proof_deadline());
    }
    found->second.name = message.hello().node();
    message.mutable_hello()->set_address(connection->remote());
    events::record(events::Kind::node_up, {}, found->second.name);
    if (auto line = membership::different_silence(
            fmt::format("node {} at {}", found->second.name, connection->remote()), message.hello().silence_ms(),
            "who listens here", membership::in_ms(silence_)))
      spdlog::warn("{}", *line);
    if (greeting.answer) connection->send(greeting.answer->SerializeAsString());
  }
  record_heard(message, bytes);
  handlers_.message(node, message);
}

// What a decision may rest on.
void NodeListener::record_heard(const proto::FromNode& message, std::string_view bytes) {
  if (message.has_heartbeat()) hear_stamp(bytes);
  if (message.has_rank_down()) {
    const auto& down = message.rank_down();
    events::record(events::Kind::heard_down, {.replica = down.replica(), .number = down.rank(), .b = down.ended()},
                   down.reason());
  }
  if (!message.has_accusation() || message.accusation().only_waiting()) return;
  const auto& accusation = message.accusation();
  constexpr std::size_t most = 256;  // more tell nothing new
  auto& [epoch, recorded] = accusations_;
  if (std::exchange(epoch, accusation.epoch()) != accusation.epoch()) recorded.clear();
  if (recorded.size() >= most ||
      !recorded.emplace(accusation.replica(), accusation.suspect(), accusation.lost()).second)
    return;  // repeated, it is one
  events::record(events::Kind::heard_accusation,
                 {.epoch = accusation.epoch(),
                  .replica = accusation.replica(),
                  .number = accusation.suspect(),
                  .a = accusation.waited_ms(),
                  .b = accusation.lost()},
                 accusation.what());
}

void NodeListener::send(NodeId node, const std::string& message) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return;
  const auto connection = found->second.connection;
  sending_ = true;
  connection->send(message);
  sending_ = false;
}

void NodeListener::close(NodeId node) {
  ended_by_send_.erase(node);
  auto silent = nodes_.extract(node);
  if (silent.empty()) return;
  events::record(events::Kind::node_lost, {}, silent.mapped().name + "\nit was silent");
  silent.mapped().connection->close();
}

void NodeListener::close_all() {
  for (auto& [node, one] : std::exchange(nodes_, {})) one.connection->close();
}

}  // namespace rejoin::daemon
