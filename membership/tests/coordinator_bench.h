// Drives a coordinator by hand: one node for each replica.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "membership/coordinator.h"

namespace rejoin::membership {

using namespace std::chrono_literals;

struct BenchOptions {
  std::optional<JobConfig::RollBack> roll_back_to = {};
  std::uint64_t steps = 0, id = 77;
  std::optional<JobConfig::Drop> drop = {};
  std::uint32_t replicas = 3, ranks = 2;
  LinkRule links{.full_mesh_members = 64};
  bool constant_batch = false;
  BalanceRule balance = {};
  bool round_trips = true;
};
struct Bench {
  JobConfig config{.replicas = 3, .ranks = 2, .batch = 10, .steps = 0, .silence = 1s};
  Coordinator coordinator;
  TimePoint now{1s};
  std::vector<proto::LogRecord> log;
  std::map<std::uint64_t, std::vector<proto::ToNode>> inbox;
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::vector<std::uint64_t> closed;  // connections
  std::string warnings, news;         // a line each

  explicit Bench(const std::vector<proto::LogRecord>& earlier = {}, BenchOptions told = {})
      : coordinator(configured(told)) {
    const auto recovered = coordinator.recover(earlier, now);
    EXPECT_TRUE(recovered) << recovered.error().message;
    keep(coordinator.on_tick(now));
  }
  JobConfig configured(const BenchOptions& told) {
    config.roll_back_to = told.roll_back_to;
    config.round_trips = told.round_trips;
    config.steps = told.steps;
    config.id = told.id;
    config.drop = told.drop;
    config.replicas = told.replicas;
    config.ranks = told.ranks;
    config.links = told.links;
    config.constant_batch = told.constant_batch;
    config.balance = told.balance;
    return config;
  }

  // Time goes by, tick by tick; these nodes are heard in it.
  void pass(Duration time, const std::vector<std::uint64_t>& heard = {0, 1, 2}) {
    for (const TimePoint until = now + time; now < until;) {
      now += config.silence / 16;
      for (auto node : heard) {
        proto::FromNode heartbeat;
        heartbeat.mutable_heartbeat();
        send(node, heartbeat);
      }
      keep(coordinator.on_tick(now));
    }
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i)
      for (std::uint32_t replica = 0; replica < 3; ++replica) reduced(replica);
  }
  // Its ranks come back as who they were, through this node.
  void back(std::uint32_t replica, std::uint64_t node, std::uint64_t instance = 1) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) back_with(replica, rank, node, instance);
  }
  void back_with(std::uint32_t replica, std::uint32_t rank, std::uint64_t node, std::uint64_t instance) {
    auto message = introduction(replica, rank, instance);
    message.mutable_rank_up()->set_incarnation(incarnations[replica]);
    send(node, message);
  }
  // After a restart: the contributor of before comes back, and ends.
  void lose_the_contributor_of(const Bench& before) {
    incarnations = before.incarnations;
    back(0, 10);
    down(0);
  }
  // … as ranks that have heard all of what another coordinator has decided.
  void back_from(const Bench& other, std::uint32_t replica) {
    for (std::uint32_t rank = 0; rank < other.config.ranks; ++rank) {
      auto message = introduction(replica, rank, 1);
      auto& up = *message.mutable_rank_up();
      up.set_incarnation(other.incarnations.at(replica));
      up.set_job(other.coordinator.job());
      up.set_heard_epoch(other.coordinator.epoch().value);
      up.set_heard_committed(other.coordinator.committed().value);
      send(replica, message);
    }
  }
  bool evicted_anybody() const {
    for (const auto& [node, told] : inbox)
      if (std::any_of(told.begin(), told.end(), [](const auto& sent) { return sent.has_evicted(); })) return true;
    return false;
  }
  std::string refusal(std::uint64_t node) {  // that came over it last
    std::string last;
    for (const auto& sent : inbox[node])
      if (sent.has_refused()) last = sent.refused().reason();
    return last;
  }
  bool registered(std::uint64_t node) {
    return std::any_of(inbox[node].begin(), inbox[node].end(), [](const auto& sent) { return sent.has_registered(); });
  }
  // Who had the places by the log has not come back in its time.
  void nobody_comes_back() { pass(config.silence + config.silence / 16, {}); }
  bool asked_to_declare(std::uint64_t node) {
    return std::any_of(inbox[node].begin(), inbox[node].end(), [](const auto& sent) { return sent.has_declare(); });
  }
  // One tensor, of so many elements.
  void declare(std::uint32_t replica, std::uint64_t count, std::uint64_t instance = 1) {
    proto::FromNode message;
    auto& told = *message.mutable_declaration();
    told.set_replica(replica);
    told.set_instance(instance * 100);
    auto& tensor = *told.add_tensors();
    tensor.set_name("w");
    tensor.set_type("float32");
    tensor.set_count(count);
    tensor.set_moments(1);
    tensor.set_elementwise(true);
    send(replica, message);
  }
  bool waits_for(const std::string& what) const {
    const auto lines = coordinator.waiting_for(now);
    return std::any_of(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.find(what) != std::string::npos; });
  }

  void keep(const Actions& actions) {
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& node : actions.close) closed.push_back(node.value);
    for (const auto& note : actions.notes) (note.warning ? warnings : news) += note.text + "\n";
    for (const auto& [nodes, message] : actions.send) {
      for (auto node : nodes) inbox[node.value].push_back(message);
      if (message.has_registered()) incarnations[message.registered().replica()] = message.registered().incarnation();
    }
  }
  void send(std::uint64_t node, const proto::FromNode& message) {
    keep(coordinator.on_message(NodeId(node), message, now));
  }
  void up(std::uint32_t replica, std::uint64_t instance = 1, std::uint64_t version = 0, std::uint64_t digest = 5,
          std::uint64_t plan = 9) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) rank_up(replica, rank, instance, version, digest, plan);
  }
  // All replicas, each connected with the others.
  void all_come(std::uint64_t instance, std::uint64_t version) {
    for (std::uint32_t replica = 0; replica < config.replicas; ++replica) up(replica, instance, version);
    link_all();
  }
  void rank_up(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t version,
               std::uint64_t digest = 5, std::uint64_t plan = 9) {
    auto message = introduction(replica, rank, instance, digest, plan);
    message.mutable_rank_up()->set_version(version);
    // As of a job in which all three replicas have contributed to every step.
    Samples trained;
    trained.add(0, version * 30);
    trained.to(message.mutable_rank_up()->mutable_trained());
    send(replica, message);
  }
  // Its ranks come with the checkpoint of a step up to which these samples are trained.
  void bring(std::uint32_t replica, std::uint64_t version, const Batch& trained, std::uint64_t instance = 1) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, instance);
      message.mutable_rank_up()->set_version(version);
      Samples samples;
      add(samples, trained);
      samples.to(message.mutable_rank_up()->mutable_trained());
      send(replica, message);
    }
  }
  std::string refused(std::uint64_t node) const {
    if (!inbox.contains(node)) return "";
    for (const auto& sent : inbox.at(node))
      if (sent.has_refused()) return sent.refused().reason();
    return "";
  }
  static proto::FromNode introduction(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance,
                                      std::uint64_t digest = 5, std::uint64_t plan = 9) {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(replica);
    up.set_rank(rank);
    up.set_instance(instance * 100 + rank);
    up.set_digest(digest);
    up.set_plan_hash(plan);
    return message;
  }
  // Each rank of each replica with all others.
  void link_all() {
    for (std::uint32_t replica = 0; replica < config.replicas; ++replica)
      for (std::uint32_t rank = 0; rank < config.ranks; ++rank) stand(replica, rank, false);
  }
  void stand(std::uint32_t replica, std::uint32_t rank, bool caught_up) { stand(replica, rank, caught_up, replica); }
  void stand(std::uint32_t replica, std::uint32_t rank, bool caught_up, std::uint64_t node) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(incarnations[replica]);
    status.set_caught_up(caught_up);
    RankSet(rank).to(status.mutable_ranks());
    Incarnations links;
    for (const auto& [other, incarnation] : incarnations)
      if (other != replica) links.insert(incarnation);
    links.to(status.mutable_links());
    send(node, message);
  }
  // Of the step under way, by no rank yet.
  proto::FromNode reduction(std::uint32_t replica) {
    proto::FromNode message;
    auto& done = *message.mutable_reduced();
    done.set_replica(replica);
    done.set_epoch(coordinator.epoch().value);
    done.set_step(coordinator.committed().value + 1);
    done.set_incarnation(incarnations[replica]);
    return message;
  }
  proto::FromNode reduction_by(std::uint32_t replica, std::uint32_t rank) {
    auto message = reduction(replica);
    RankSet(rank).to(message.mutable_reduced()->mutable_ranks());
    return message;
  }
  void reduced_by(std::uint32_t replica, std::uint32_t rank) { send(replica, reduction_by(replica, rank)); }
  void reduced(std::uint32_t replica) { reduced(replica, replica); }
  void reduced(std::uint32_t replica, std::uint64_t node, std::uint64_t compute_us = 0) {
    auto message = reduction(replica);
    auto& done = *message.mutable_reduced();
    done.set_compute_us(compute_us);
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) RankSet(rank).to(done.mutable_ranks());
    send(node, message);
  }
  void down(std::uint32_t replica, std::uint64_t instance = 1, std::uint32_t rank = 1) {
    proto::FromNode message;
    auto& gone = *message.mutable_rank_down();
    gone.set_replica(replica);
    gone.set_rank(rank);
    gone.set_instance(instance * 100 + rank);
    gone.set_reason("killed");
    gone.set_ended(true);
    send(replica, message);
  }
  // Of this epoch: it has waited too long, or (lost) their connection has broken.
  void accuse(std::uint32_t who, std::uint32_t suspect, bool lost = false, bool only_waiting = false,
              std::optional<std::uint64_t> node = {}) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(who);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(suspect);
    a.set_what(lost ? "connection reset" : "chunk 3 of 9 of the reduce-scatter");
    a.set_lost(lost);
    a.set_only_waiting(only_waiting);
    send(node.value_or(who), message);
  }
  void excuse(std::uint32_t who, const char* what = "its trainer, which is between steps", bool excused = true) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(who);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(who);
    a.set_what(what);
    a.set_only_waiting(true);
    a.set_excused(excused);
    send(who, message);
  }
  void start() {
    for (std::uint32_t r = 0; r < 3; ++r) up(r);
    link_all();
  }
  // Replica 1 has been lost, and has come back as a joiner.
  void join_again(std::initializer_list<std::uint32_t> others) {
    down(1);
    up(1, 2);
    link_all();
    for (auto replica : others) reduced(replica);
  }
  // After step 3 replica 0 contributes, 1 is a joiner, and 2 is gone.
  void start_with_a_joiner() {
    start();
    steps(2);
    down(2);
    join_again({0});
  }
  // A joiner's stream has ended, on all of its ranks.
  void caught_up(std::uint32_t replica) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) stand(replica, rank, true);
  }
  void expect_alone(std::uint32_t replica) const {
    ASSERT_EQ(contributors(), 1u);
    EXPECT_EQ(coordinator.members()[0].replica, ReplicaId(replica));
  }
  std::size_t contributors() const {
    return static_cast<std::size_t>(std::count_if(coordinator.members().begin(), coordinator.members().end(),
                                                  [](const auto& m) { return !m.catching_up; }));
  }
};

}  // namespace rejoin::membership
