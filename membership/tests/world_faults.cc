// What dies, stops and starts again.
#include "membership/tests/world.h"

namespace rejoin::membership {

void World::fail(std::uint64_t kind, std::uint32_t replica, std::uint32_t number) {
  NodeProcess& node = node_of(replica, number, pick_host());
  RelayProcess* relay = relay_of(node);
  if (kind == 12) return connect_elsewhere(node);
  if (relay == nullptr) kind %= 10;
  switch (kind) {
    case 0:
    case 1: return kill_rank(node, number);
    case 7:
      if (node.ranks[number]) node.ranks[number]->stopped_until = now + for_a_while();
      return;
    case 8: node.stopped_until = now + for_a_while(); return;
    case 9: coordinator_stopped_until = now + for_a_while(); return;
    case 2: return disconnect(node);
    case 3: return restart_daemon(node, replica);
    case 4: return start_coordinator_again();
    case 5: now += for_a_while(); return;  // everybody stands still
    case 6: {                              // any set of them
      const TimePoint until = now + for_a_while();
      for (auto& each : nodes) {
        if (pick(2) == 0) each.stopped_until = until;
        for (auto& rank : each.ranks)
          if (rank && pick(2) == 0) rank->stopped_until = until;
      }
      for (auto& each : relays)
        if (pick(2) == 0) each.stopped_until = until;
      if (pick(2) == 0) coordinator_stopped_until = until;
      return;
    }
    case 10: return restart_relay(*relay);
    case 11: {
      if (pick(2) == 0) {
        relay->stopped_until = now + for_a_while();
        return;
      }
      const auto before = relay->coordinator_connection;
      relay_lost_coordinator(*relay);
      if (before != 0) keep(coordinator->on_node_lost(NodeId(before), now));
      return;
    }
  }
}

void World::kill_rank(NodeProcess& node, std::uint32_t number) {
  if (!node.ranks[number]) return;
  const auto connection = node.ranks[number]->connection;
  node.ranks[number].reset();
  keep(node, node.machine->on_rank_gone(connection, "killed", Node::Gone::ended));
}

void World::restart_daemon(NodeProcess& node, std::uint32_t replica) {
  disconnect(node);
  node.machine = std::make_unique<Node>("n", config.silence, ++instances);
  for (std::uint32_t number = 0; number < config.ranks; ++number) {
    auto& rank = node.ranks[number];
    if (!rank) continue;
    greet_again(node, replica, number);
  }
}

void World::connect_elsewhere(NodeProcess& node) {
  if (stopped(node)) return;
  if (pick(2) == 0) disconnect(node);
  else cut(node);
  if (!relays.empty()) node.relay = pick(relays.size());
  connect(node);
}

void World::restart_relay(RelayProcess& relay) {
  const auto before = relay.coordinator_connection;
  relay_lost_coordinator(relay);
  for (auto& node : nodes)
    if (relay_of(node) == &relay) cut(node);
  relay.machine = std::make_unique<Relay>("r", config.silence);
  if (before != 0) keep(coordinator->on_node_lost(NodeId(before), now));
}

}  // namespace rejoin::membership
