// Where the node's catch-up stream and its trainers are, for other nodes, and whose streams can't reach it.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "daemon/node_server.h"
#include "membership/rank.h"
#include "transport/advertise.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

namespace {

constexpr Duration kSeekAgain = std::chrono::seconds(1);

bool of_this_machine(const std::string& host) {
  return !host.empty() && transport::SocketAddress::check_own({host, 0}).has_value();
}

}  // namespace

// ---- this machine's own addresses: see "Where others find a node" in docs/design-notes.md

// Its own end of the connection with the coordinator is where peers find this machine, as far as it can tell. What is
// known besides stays where nothing else is there: an interface may be away for a moment.
void NodeServer::find_own_hosts(bool connected_anew) {
  const auto& [here, there] = coordinators_.ends();
  const auto parts = transport::SocketAddress::split(there);
  coordinator_is_here_ = !parts || of_this_machine(parts->host);
  auto found = transport::own_hosts(here);
  const auto before = own_hosts_.value_or(transport::OwnHosts());
  const auto keep = [connected_anew](std::string& host, const std::string& known) {
    if (host.empty() || (!connected_anew && of_this_machine(known))) host = known;
  };
  keep(found.v4, before.v4);
  keep(found.v6, before.v6);
  own_hosts_ = std::move(found);
  own_hosts_sought_ = now();
}

bool NodeServer::needs_own_hosts() const {
  const auto stream = transport::advertised({host_->thread->address()}, options_.advertise);
  return (stream && transport::listens_everywhere(*stream)) || std::ranges::any_of(trainers_, [](const auto& one) {
           return one.second.key &&
                  (transport::listens_everywhere({one.second.listens}) || !one.second.card_listening.empty());
         });
}

// Where the coordinator is on this machine no connection ends when its address changes, or it gets its first.
void NodeServer::look_for_own_hosts() {
  if (!machine_.coordinator_up() || now() - own_hosts_sought_ < kSeekAgain || !needs_own_hosts()) return;
  find_own_hosts(false);
  if (place_trainers()) carry_out(machine_.on_coordinator_up(now()));
}

// Returns whether the coordinator has to hear of a trainer that is somewhere else now.
bool NodeServer::place_trainers() {
  bool moved = false;
  std::vector<std::pair<membership::RankConnection, Error>> nowhere;
  for (const auto& [id, trainer] : trainers_) {
    if (!trainer.key) continue;
    const auto place = place_of(trainer, *trainer.stream);
    if (!place) nowhere.emplace_back(id, place.error());
    else moved |= machine_.move(id, place->engine, place->stream, place->card);
  }
  for (const auto& [id, error] : nowhere) refuse(id, error);
  say_where_it_is();
  return moved;
}

// ---- what others are told

// A loopback's address is good for a job of this machine alone.
Result<std::string> NodeServer::told(const std::string& listening) const {
  if (!own_hosts_ || !transport::listens_everywhere({listening})) return listening;
  const auto told = transport::with_own_host_for_any(
      {listening}, coordinator_is_here_ ? transport::or_loopback(*own_hosts_) : *own_hosts_);
  if (!transport::listens_everywhere(told)) return told.text;
  const bool v4_alone = told.text.find("0.0.0.0:") != std::string::npos;
  return fail(ErrorCode::unavailable,
              "it listens on {}{}, and node {} has no {}address that other nodes could be told{}: give {}--advertise "
              "with an address that they reach",
              listening, v4_alone ? ", over IPv4 alone" : "", options_.name, v4_alone ? "IPv4 " : "",
              v4_alone ? "" : " but the loopback's and link-local ones",
              v4_alone ? "--data-listen [::]:PORT, or " : "");
}

Result<std::string> NodeServer::advertised(const std::string& stream) const {
  return transport::advertised({stream}, options_.advertise).and_then([this](const transport::Address& address) {
    return told(address.text);
  });
}

// One that listens everywhere and was given no --advertise of its own is where its daemon is.
Result<std::string> NodeServer::advertised_of_trainer(const std::string& address) const {
  if (!transport::listens_everywhere({address})) return address;
  const bool one = !options_.advertise.empty() && options_.advertise.find(',') == std::string::npos;
  return one ? transport::with_host_for_any({address}, options_.advertise).text : told(address);
}

// With this machine's address for others. Where there is none for it, and from trainers of the release before, it has
// one that the trainer found by itself, at its start.
std::string NodeServer::card_of(const Trainer& trainer) const {
  const auto& text = trainer.card_listening;
  if (text.empty()) return trainer.card;
  const std::size_t at = text.rfind(' ') + 1;  // 0: it is all of it
  const auto address = advertised_of_trainer(text.substr(at));
  const std::string card = address ? text.substr(0, at) + *address : trainer.card;
  return card.size() <= membership::kMostCardBytes ? card : trainer.card;
}

Result<NodeServer::Place> NodeServer::place_of(const Trainer& trainer, const StreamThread& stream) const {
  auto its = advertised_of_trainer(trainer.listens);
  if (!its) return tl::unexpected(its.error());
  const auto of_stream = advertised(stream.address());
  if (!of_stream) return tl::unexpected(of_stream.error());
  return Place{std::move(*its), stream_address(family_, *of_stream), card_of(trainer)};
}

// Once, and again where it is another one.
void NodeServer::say_where_it_is() {
  const auto address = advertised(host_->thread->address());
  if (address && !own_hosts_ && transport::listens_everywhere({*address})) return;
  const std::string line =
      address
          ? fmt::format("other nodes are told that this one's catch-up stream is at {}", *address)
          : fmt::format("other nodes can't be told where this one's catch-up stream is: {}", address.error().message);
  if (line != said_where_) {
    const bool first = std::exchange(said_where_, line).empty();
    if (!address) spdlog::error("{}", line);
    else if (first) spdlog::info("{}", line);
    else spdlog::warn("this node's address has changed: {}", line);
    if (address && transport::is_link_local({*address}))
      spdlog::warn("that is a link-local address: it is of use to machines alone whose interface has the same name");
  }
  if (!address || !own_hosts_ || !transport::is_loopback({*address})) return;
  const bool v4_alone = coordinator_is_here_ && transport::listens_everywhere({host_->thread->address()}) &&
                        own_hosts_->v4.empty() && !own_hosts_->v6.empty();
  if ((coordinator_is_here_ && !v4_alone) || std::exchange(warned_of_loopback_, true)) return;
  if (v4_alone)
    return spdlog::warn(
        "other machines can't reach {}, which this one's nodes are told of: it has IPv6 addresses alone, and listens "
        "over IPv4 alone: give --data-listen [::]:PORT",
        *address);
  spdlog::warn(
      "other nodes are told of {}, this machine's loopback, where they don't reach it, and the coordinator is on "
      "another machine, at {}: give --data-listen 0.0.0.0:0, or --advertise",
      *address, coordinators_.ends().there);
}

void NodeServer::warn_of(const StrangeStream& stream) {
  constexpr std::size_t most = 1024;  // as many replicas as a job can have
  if (warned_of_.size() >= most) warned_of_.clear();
  if (!warned_of_.insert(stream).second) return;
  spdlog::warn(
      "the catch-up stream of replica {}'s daemon goes over {}, and this node's over {}: neither replica can catch up "
      "from the other. Start all daemons of a job with the same --transport",
      stream.replica, stream.family, family_);
}

}  // namespace rejoin::daemon
