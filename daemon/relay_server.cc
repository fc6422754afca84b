#include "daemon/relay_server.h"

#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/fail.h"
#include "daemon/listen.h"
#include "daemon/log_notes.h"

namespace rejoin::daemon {

using membership::NodeId;

RelayServer::RelayServer(asio::io_context& io, const std::string& name, const std::string& coordinator,
                         std::chrono::milliseconds silence, const JobKeys& keys)
    : silence_(silence),
      timer_(io),
      machine_(name, silence),
      nodes_(io, keys, silence,
             {.message =
                  [this](NodeId node, const proto::FromNode& message) {
                    carry_out(machine_.on_node_message(node, message, now()));
                  },
              .lost = [this](NodeId node) { carry_out(machine_.on_node_lost(node, now())); },
              .takes_relays = false}),
      coordinators_(
          io, coordinator, name, keys, silence, [this](proto::LeaderView& view) { machine_.write_hosts(view); },
          {.up = [this] { carry_out(machine_.on_coordinator_up(now())); },
           .message =
               [this](const proto::ToNode& message) { carry_out(machine_.on_coordinator_message(message, now())); },
           .down = [this] { carry_out(machine_.on_coordinator_down(now())); },
           .over = [this] { return machine_.finished(); },
           .rejected = [this] { ++rejected_; }}) {}

Result<std::unique_ptr<RelayServer>> RelayServer::start(asio::io_context& io, const std::string& name,
                                                        const std::string& listen, const std::string& coordinator,
                                                        std::chrono::milliseconds silence, const JobKeys& keys) {
  std::unique_ptr<RelayServer> relay(new RelayServer(io, name, coordinator, silence, keys));
  if (auto listening = relay->nodes_.listen(listen); !listening)
    return fail(listening.error().code,
                "the relay can't listen on {}: {}; choose another --relay address or stop what uses it", listen,
                listening.error().message);
  for (const auto& each : split(coordinator, ','))
    if (leads_to(each, relay->address()))
      return fail(ErrorCode::invalid_argument,
                  "--connect {} leads to this relay itself, which listens on {}; give it the coordinator's address",
                  each, relay->address());
  relay->coordinators_.connect();
  relay->tick();
  return relay;
}

void RelayServer::tick() {
  timer_.expires_after(deadlines::tick_of(silence_));
  timer_.async_wait([this](asio::error_code error) {
    if (error) return;
    coordinators_.tick(now());
    carry_out(machine_.on_tick(now()));
    if (machine_.coordinator_up()) coordinators_.check(machine_.coordinator_heard());
    tick();
  });
}

void RelayServer::carry_out(const membership::Relay::Actions& actions) {
  log_notes(actions.notes, "relay: ");
  for (const auto& message : actions.to_coordinator) coordinators_.send(message);
  for (const auto& [nodes, message] : actions.to_nodes) {
    const std::string bytes = message.SerializeAsString();
    for (auto node : nodes) nodes_.send(node, bytes);
  }
  for (auto node : actions.close) nodes_.close(node);
}

nlohmann::json RelayServer::status() const {
  return {{"coordinator", coordinators_.status(machine_.coordinator_up())},
          {"nodes", nodes_.nodes()},
          {"ranks", machine_.ranks()},
          {"rejected", rejected_ + nodes_.rejected()},
          {"strangers", nodes_.strangers()}};
}

}  // namespace rejoin::daemon
