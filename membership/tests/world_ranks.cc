// Rank processes: how they come, what they do with what arrives, and whether a replica of them holds the state.
#include <fmt/format.h>

#include "membership/tests/world.h"

namespace rejoin::membership {

void World::spawn(NodeProcess& node, std::uint32_t replica, std::uint32_t number) {
  RankProcess rank;
  rank.machine = std::make_unique<Rank>(ReplicaId(replica));
  rank.instance = ++instances;
  rank.connection = RankConnection(++connections);
  // A fresh process starts from the initial state; version 0 has the same bits everywhere.
  node.ranks[number] = std::move(rank);
  proto::FromNode up;
  up.mutable_rank_up()->set_replica(replica);
  up.mutable_rank_up()->set_rank(number);
  up.mutable_rank_up()->set_instance(node.ranks[number]->instance);
  up.mutable_rank_up()->set_plan_hash(3);
  up.mutable_rank_up()->set_digest(1);
  up.mutable_rank_up()->set_speaks(kProtocolVersion);
  up.mutable_rank_up()->set_weighs(true);
  keep(node, node.machine->on_rank_message(node.ranks[number]->connection, up, now));
}

void World::greet_again(NodeProcess& node, std::uint32_t replica, std::uint32_t number) {
  auto& rank = node.ranks[number];
  rank->connection = RankConnection(++connections);
  rank->inbox.clear();
  rank->reported_ready = false;
  proto::FromNode up;
  auto& message = *up.mutable_rank_up();
  message.set_replica(replica);
  message.set_rank(number);
  message.set_instance(rank->instance);
  message.set_plan_hash(3);
  message.set_incarnation(rank->machine->incarnation().value);
  message.set_digest(1);  // as it was when it joined
  message.set_speaks(kProtocolVersion);
  message.set_weighs(true);
  if (rank->machine->reduced()) {
    message.set_reduced_epoch(rank->machine->epoch().value);
    message.set_reduced_step(rank->machine->step().value);
  }
  keep(node, node.machine->on_rank_message(rank->connection, up, now));
}

void World::hang_up(NodeProcess& node, RankConnection connection) {
  for (auto& rank : node.ranks)
    if (rank && rank->connection == connection) rank->connection = {}, rank->inbox.clear();
}

void World::deliver(NodeProcess& node, std::uint32_t replica, std::uint32_t number) {
  RankProcess& rank = *node.ranks[number];
  const auto message = std::move(rank.inbox.front());
  rank.inbox.pop_front();
  if (message.has_registered()) rank.machine->on_registered(Incarnation(message.registered().incarnation()));
  if (message.has_refused() && hosts > 1) return kill_rank(node, number);
  if (message.has_evicted() && message.evicted().incarnation() == rank.machine->incarnation().value) {
    check_that_it_was_left_behind(rank, replica, message.evicted());
    check_that_another_holds(replica);
    return kill_rank(node, number);
  }
  if (message.has_peers()) {
    proto::FromNode links;
    links.mutable_links()->set_replica(replica);
    links.mutable_links()->set_rank(number);
    links.mutable_links()->set_instance(rank.instance);
    (void)rank.peers.apply(message.peers());
    rank.peers.incarnations(number).to(links.mutable_links()->mutable_incarnations());
    keep(node, node.machine->on_rank_message(rank.connection, links, now));
  }
  if (!message.has_plan()) return;
  const bool was_member = rank.machine->member() || rank.machine->suspended();
  const Step under_way = rank.machine->step();
  const auto meaning = rank.machine->on_plan(message.plan());
  rank.contributor = rank.machine->contributes() || rank.machine->suspended();
  if (!was_member && (rank.machine->member() || rank.machine->suspended())) {
    rank.current = rank.machine->contributes() || rank.machine->suspended();
    if (rank.current && rank.version != rank.machine->committed().value)
      trouble = "same-bits: a contributor starts at another version";
  }
  if (meaning == Rank::Meaning::evicted) {
    check_that_another_holds(replica);
    return kill_rank(node, number);
  }
  if (meaning == Rank::Meaning::committed) apply(rank, replica, under_way);
  if (rank.machine->contributes() && !rank.current) trouble = "same-bits: promoted before it was current";
}

void World::apply(RankProcess& rank, std::uint32_t replica, Step step) {
  auto digest = decided.find(step.value);
  if (digest == decided.end()) {
    trouble = fmt::format("one-decision: replica {} applies step {} that nobody decided", replica, step.value);
    return;
  }
  if (rank.current) {
    if (rank.version + 1 != step.value)
      trouble = fmt::format("same-bits: replica {} goes from {} to {}", replica, rank.version, step.value);
    rank.version = step.value;
    rank.bits = mix(rank.bits, digest->second);
    const auto [it, fresh] = bits_at.emplace(rank.version, rank.bits);
    if (!fresh && it->second != rank.bits)
      trouble = fmt::format("same-bits: replica {} differs at version {}", replica, rank.version);
  } else if (auto known = bits_at.find(step.value); known != bits_at.end() && pick(3) == 0) {
    rank.version = step.value;  // stands for the stream: at some step its state is complete
    rank.bits = known->second;
    rank.current = true;
  }
}

void World::work(NodeProcess& node, std::uint32_t replica, std::uint32_t number) {
  RankProcess& rank = *node.ranks[number];
  if (!rank.machine->member() || rank.machine->reduced() || !rank.machine->has_contributors()) return;
  if (!rank.machine->contributes() && rank.current && !rank.reported_ready) {
    rank.reported_ready = true;
    proto::FromNode ready;
    ready.mutable_caught_up()->set_replica(replica);
    ready.mutable_caught_up()->set_rank(number);
    ready.mutable_caught_up()->set_instance(rank.instance);
    keep(node, node.machine->on_rank_message(rank.connection, ready, now));
  }
  rank.machine->on_reduced();
  proto::FromNode done;
  done.mutable_reduced()->set_replica(replica);
  done.mutable_reduced()->set_epoch(rank.machine->epoch().value);
  done.mutable_reduced()->set_step(rank.machine->step().value);
  RankSet(number).to(done.mutable_reduced()->mutable_ranks());
  done.mutable_reduced()->set_compute_us(pick(20));
  keep(node, node.machine->on_rank_message(rank.connection, done, now));
}

bool World::holds(std::uint32_t replica, Step committed) {
  for (std::uint32_t number = 0; number < config.ranks; ++number) {
    const auto& rank = node_of(replica, number).ranks[number];
    if (!rank || !rank->current || !rank->contributor) return false;
    const bool about_to =
        rank->version + 1 == committed.value && contributed[committed.value].contains(rank->machine->incarnation());
    if (rank->version != committed.value && !about_to) return false;
  }
  return true;
}

void World::check_that_it_was_left_behind(const RankProcess& rank, std::uint32_t replica,
                                          const proto::Evicted& evicted) {
  if (!evicted.reason().starts_with("it has been out before") && !evicted.reason().starts_with("another process"))
    return;
  const Incarnation own = rank.machine->incarnation();
  const auto& last = *given[replica].rbegin();
  if (joined.contains(own) || last.first != own || commits > last.second) return;
  trouble = fmt::format("no-false-eviction: replica {} waits to be taken in, and is sent away: {}", replica,
                        evicted.reason());
}

void World::check_that_it_is_its_own(const proto::Registered& its) {
  const auto [owner, first] = owners.emplace(std::tuple(its.replica(), its.rank(), its.incarnation()), its.instance());
  if (owner->second != its.instance())
    trouble = fmt::format("one-process: two processes are replica {} rank {} in incarnation {}", its.replica(),
                          its.rank(), its.incarnation());
}

void World::check_that_another_holds(std::uint32_t replica) {
  if (hosts > 1) return;
  const Step committed = coordinator->committed();
  if (!holds(replica, committed) || committed == Step{}) return;
  for (std::uint32_t other = 0; other < config.replicas; ++other)
    if (other != replica && holds(other, committed)) return;
  trouble = fmt::format("state-survives: replica {} is told to leave, and nobody else has step {}", replica, committed);
}

}  // namespace rejoin::membership
