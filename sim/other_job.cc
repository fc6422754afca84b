#include "sim/other_job.h"

#include <fmt/format.h>

#include "sim/world.h"

namespace rejoin::sim {

OtherCoordinator::OtherCoordinator(World& world, std::uint32_t of, std::uint32_t at, const membership::JobConfig& job,
                                   std::vector<proto::LogRecord>& log, Store* store)
    : CoordinatorProcess(world.next_number(), of, at, world.chance("coordinator of another job"), 0),
      world_(world),
      log_(log),
      store_(store) {
  if (store_ != nullptr) {
    replicated_ = std::make_unique<Replicated>(Replicated::Options{.job = job,
                                                                   .name = "another job's",
                                                                   .address = fmt::format("coordinator {}", of),
                                                                   .instance = instance,
                                                                   .copied = 0,
                                                                   .copied_job = 0},
                                               local_now());
    return;
  }
  alone_ = std::make_unique<membership::Coordinator>(job);
  if (auto recovered = alone_->recover(log_, local_now()); !recovered)
    world_.checker().violate("no-garbage", recovered.error().message);
}

TimePoint OtherCoordinator::local_now() const { return world_.now_at(machine); }

void OtherCoordinator::tick() {
  if (alone_) carry_out(alone_->on_tick(local_now()));
  else carry_out(replicated_->on_tick(local_now()));
}

void OtherCoordinator::on_message(std::uint64_t link, const proto::FromNode& message) {
  welcome(world_, link, message);
  if (alone_) carry_out(alone_->on_message(membership::NodeId(link), message, local_now()));
  else carry_out(replicated_->on_message(membership::NodeId(link), message, local_now()));
}

void OtherCoordinator::on_link_lost(std::uint64_t link) {
  if (alone_) carry_out(alone_->on_node_lost(membership::NodeId(link), local_now()));
  else carry_out(replicated_->on_node_lost(membership::NodeId(link), local_now()));
}

void OtherCoordinator::on_answer(const membership::StoreAnswer& answer) {
  carry_out(replicated_->on_answer(answer, local_now()));
}

void OtherCoordinator::carry_out(const membership::Actions& actions) {
  log_.insert(log_.end(), actions.append.begin(), actions.append.end());
  for (const auto& record : actions.append)
    if (record.has_committed()) world_.count("step of another job");
  send(actions);
}

void OtherCoordinator::carry_out(const Replicated::Actions& actions) {
  if (actions.failed) return world_.checker().violate("no-garbage", actions.failed->message);
  if (actions.request) store_->submit(number, instance, *actions.request);
  send(actions);
}

void OtherCoordinator::send(const auto& actions) {
  for (const auto& note : actions.notes) world_.note("another job's coordinator: {}", note.text);
  for (const auto& [nodes, message] : actions.send) {
    world_.check_that_it_sends_nobody_away(message);
    for (auto node : nodes) world_.to_caller(node.value, message);
  }
  for (const auto& node : actions.close) world_.drop_link(node.value);
}

}  // namespace rejoin::sim
