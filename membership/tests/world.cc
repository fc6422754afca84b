// What carries messages between the machines, and lets time go by.
#include "membership/tests/world.h"

#include <fmt/format.h>

#include <utility>

namespace rejoin::membership {

World::World(std::uint64_t seed, bool with_relays, Rivals rivals) : random(seed), hosts(rivals == Rivals::yes ? 2 : 1) {
  if (hosts > 1) {
    config.replicas = 2 + static_cast<std::uint32_t>(seed % 4);
    config.ranks = 1 + static_cast<std::uint32_t>(seed / 4 % 3);
  }
  config.constant_batch = seed % 3 == 0;
  config.balance = {.on = seed % 4 == 0, .every = 2, .gain = 0};
  start_coordinator();
  nodes.resize(hosts * (with_relays ? config.replicas * config.ranks : config.replicas));
  if (with_relays) relays.resize(config.replicas);
  for (auto& relay : relays) relay.machine = std::make_unique<Relay>("r", config.silence);
  for (auto& node : nodes) {
    node.machine = std::make_unique<Node>("n", config.silence, ++instances);
    node.ranks.resize(config.ranks);
  }
}

void World::start_coordinator(std::optional<JobConfig::RollBack> roll_back_to) {
  config.roll_back_to = roll_back_to;
  coordinator_stopped_until = {};
  coordinator = std::make_unique<Coordinator>(config);
  if (auto recovered = coordinator->recover(log, now); !recovered) trouble = recovered.error().message;
  for (auto& node : nodes)
    if (relay_of(node) == nullptr) cut(node);
  for (auto& relay : relays) relay.coordinator_connection = 0, forget(relay);
}

void World::start_coordinator_again(std::optional<JobConfig::RollBack> roll_back_to) {
  for (auto& relay : relays) relay_lost_coordinator(relay);
  start_coordinator(roll_back_to);
}

void World::cut(NodeProcess& node) {
  if (std::exchange(node.coordinator_connection, 0) == 0) return;
  forget(node);
  node.machine->on_coordinator_down();
}

void World::connect(NodeProcess& node) {
  node.coordinator_connection = ++connections;
  keep(node, node.machine->on_coordinator_up(now));
}

void World::disconnect(NodeProcess& node) {
  if (node.coordinator_connection == 0) return;
  const NodeId id(node.coordinator_connection);
  cut(node);
  if (RelayProcess* relay = relay_of(node)) keep(*relay, relay->machine->on_node_lost(id, now));
  else keep(coordinator->on_node_lost(id, now));
}

void World::relay_lost_coordinator(RelayProcess& relay) {
  relay.coordinator_connection = 0;
  forget(relay);
  keep(relay, relay.machine->on_coordinator_down(now));
}

void World::keep(const Actions& actions) {
  for (const auto& record : actions.append) {
    for (const auto& m : record.epoch().members()) joined.insert(Incarnation(m.incarnation()));
    if (record.has_committed()) {
      ++commits;
      std::uint64_t digest = 7;
      for (const auto& m : record.committed().members()) {
        contributed[record.committed().step()].insert(Incarnation(m.incarnation()));
        for (const auto& range : m.batch()) digest = mix(mix(digest, range.begin()), range.end());
      }
      const auto [it, fresh] = decided.emplace(record.committed().step(), digest);
      if (!fresh) trouble = fmt::format("one-decision: step {} was committed twice", record.committed().step());
    }
    if (record.has_rolled_back()) {
      if (record.rolled_back().version() < record.rolled_back().from())
        for (std::uint32_t replica = 0; replica < config.replicas; ++replica)
          if (hosts == 1 && holds(replica, Step(record.rolled_back().from())))
            trouble = fmt::format("state-survives: rolled back from {} to {} though replica {} lives",
                                  record.rolled_back().from(), record.rolled_back().version(), replica);
      decided.erase(decided.upper_bound(record.rolled_back().version()), decided.end());
      bits_at.erase(bits_at.upper_bound(record.rolled_back().version()), bits_at.end());
    }
    log.push_back(record);
  }
  for (const auto& [ids, message] : actions.send) {
    if (const auto& its = message.registered(); message.has_registered()) {
      given[its.replica()].try_emplace(Incarnation(its.incarnation()), commits);
      check_that_it_is_its_own(its);
    }
    for (auto id : ids) {
      for (auto& relay : relays)
        if (relay.coordinator_connection == id.value) relay.from_coordinator.push_back(message);
      for (auto& node : nodes)
        if (node.coordinator_connection == id.value) node.from_coordinator.push_back(message);
    }
  }
  for (const auto& id : actions.close) {
    for (auto& relay : relays)
      if (relay.coordinator_connection == id.value) relay_lost_coordinator(relay);
    for (auto& node : nodes)
      if (node.coordinator_connection == id.value) cut(node);
  }
}

void World::keep(RelayProcess& relay, const Relay::Actions& actions) {
  if (relay.coordinator_connection != 0)
    for (const auto& message : actions.to_coordinator) relay.to_coordinator.push_back(message);
  for (auto& node : nodes)
    for (const auto& [ids, message] : actions.to_nodes)
      if (std::find(ids.begin(), ids.end(), NodeId(node.coordinator_connection)) != ids.end())
        node.from_coordinator.push_back(message);
  for (auto& node : nodes)
    if (std::find(actions.close.begin(), actions.close.end(), NodeId(node.coordinator_connection)) !=
        actions.close.end())
      cut(node);
}

void World::keep(NodeProcess& node, const Node::Actions& actions) {
  if (node.coordinator_connection != 0)
    for (const auto& message : actions.to_coordinator) node.to_coordinator.push_back(message);
  for (const auto& [connection, message] : actions.to_ranks)
    for (auto& rank : node.ranks)
      if (rank && rank->connection == connection) rank->inbox.push_back(message);
}

void World::tick() {
  now += 100ms;
  for (auto& node : nodes) {
    if (stopped(node)) continue;
    proto::FromNode alive;
    alive.mutable_heartbeat();
    for (auto& rank : node.ranks)
      if (rank && !stopped(*rank)) keep(node, node.machine->on_rank_message(rank->connection, alive, now));
    const auto actions = node.machine->on_tick(now);
    keep(node, actions);
    for (auto silent : actions.silent) hang_up(node, silent);
  }
  for (auto& relay : relays)
    if (!stopped(relay)) keep(relay, relay.machine->on_tick(now));
  if (now < coordinator_stopped_until) return;
  keep(coordinator->on_tick(now));
  if (auto wanted = coordinator->wants_roll_back()) {
    ++roll_backs;
    start_coordinator_again(coordinator->word_for(*wanted));
  }
}

void World::step(int fault_rate) {
  const auto replica = static_cast<std::uint32_t>(pick(config.replicas));
  const auto number = static_cast<std::uint32_t>(pick(config.ranks));
  const std::uint32_t host = pick_host();
  NodeProcess& node = node_of(replica, number, host);
  RelayProcess* relay = relay_of(node);
  if (fault_rate > 0 && pick(1000) < static_cast<std::uint64_t>(fault_rate))
    return fail(pick(relay != nullptr ? 12 : 10), replica, number);
  switch (pick(relay != nullptr ? 10 : 7)) {
    case 0:
      if (node.coordinator_connection == 0 && !stopped(node)) connect(node);
      break;
    case 1:
      if (!node.ranks[number] && !stopped(node) && may_start(replica, number, host)) spawn(node, replica, number);
      else if (node.ranks[number] && !stopped(node) && !stopped(*node.ranks[number]) &&
               node.ranks[number]->connection == RankConnection{})
        greet_again(node, replica, number);
      break;
    case 2:
      if (!node.to_coordinator.empty()) {
        if (relay != nullptr ? stopped(*relay) : now < coordinator_stopped_until) break;
        const auto message = std::move(node.to_coordinator.front());
        node.to_coordinator.pop_front();
        const NodeId id(node.coordinator_connection);
        if (relay != nullptr) keep(*relay, relay->machine->on_node_message(id, message, now));
        else keep(coordinator->on_message(id, message, now));
      }
      break;
    case 3:
      if (!node.from_coordinator.empty() && !stopped(node)) {
        const auto message = std::move(node.from_coordinator.front());
        node.from_coordinator.pop_front();
        keep(node, node.machine->on_coordinator_message(message, now));
      }
      break;
    case 4:
      if (node.ranks[number] && !node.ranks[number]->inbox.empty() && !stopped(*node.ranks[number]))
        deliver(node, replica, number);
      break;
    case 5:
      // What it says while its daemon is stopped waits in the socket; here it waits in the rank.
      if (node.ranks[number] && !stopped(*node.ranks[number]) && !stopped(node)) work(node, replica, number);
      break;
    case 6:
      if (pick(60) == 0) tick();
      break;
    case 7:
      if (relay->coordinator_connection != 0 || stopped(*relay)) break;
      relay->coordinator_connection = ++connections;
      keep(*relay, relay->machine->on_coordinator_up(now));
      break;
    case 8:
      if (!relay->to_coordinator.empty() && now >= coordinator_stopped_until) {
        const auto message = std::move(relay->to_coordinator.front());
        relay->to_coordinator.pop_front();
        keep(coordinator->on_message(NodeId(relay->coordinator_connection), message, now));
      }
      break;
    case 9:
      if (!relay->from_coordinator.empty() && !stopped(*relay)) {
        const auto message = std::move(relay->from_coordinator.front());
        relay->from_coordinator.pop_front();
        keep(*relay, relay->machine->on_coordinator_message(message, now));
      }
      break;
  }
}

}  // namespace rejoin::membership
