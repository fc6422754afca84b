// A coordinator whose replicas stand in its ring by where they are.
#pragma once

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {

// Replicas, one node each, that say where they are, or nothing where the place is empty.
struct OrderBench : Bench {
  std::vector<std::string> places;

  explicit OrderBench(std::vector<std::string> told, const std::vector<proto::LogRecord>& earlier = {},
                      BenchOptions job = {})
      : Bench(earlier, with(job, told.size())), places(std::move(told)) {}
  static BenchOptions with(BenchOptions job, std::size_t replicas) {
    job.replicas = static_cast<std::uint32_t>(replicas);
    return job;
  }
  void come(std::uint32_t replica, std::uint64_t instance = 1, bool again = false) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, instance);
      if (again) message.mutable_rank_up()->set_incarnation(incarnations[replica]);
      message.mutable_rank_up()->set_location(places[replica]);
      message.mutable_rank_up()->set_node("n" + std::to_string(replica));
      send(replica, message);
    }
  }
  void step() {
    for (const auto& m : std::vector(coordinator.members())) reduced(m.replica.value);
  }
  static std::string text_of(const auto& members) {
    std::string text;
    for (const auto& m : members) text += fmt::format("{}{} ", m.replica(), m.catching_up() ? "c" : "");
    return text;
  }
  static std::string order_of(const Coordinator& of) {
    std::string text;
    for (const auto& m : of.members()) text += fmt::format("{}{} ", m.replica, m.catching_up ? "c" : "");
    return text;
  }
  std::string order() const { return order_of(coordinator); }
  std::string planned() const {  // as the last plan says it
    std::string text;
    for (const auto& message : inbox.at(0))
      if (message.has_plan()) text = text_of(message.plan().members());
    return text;
  }
};

}  // namespace rejoin::membership
