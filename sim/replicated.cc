#include "sim/replicated.h"

#include <fmt/format.h>

#include "sim/world.h"

namespace rejoin::sim {

namespace {
constexpr std::size_t kClaims = 14, kLines = 8;
constexpr int kWithin = 3;  // silences, in which the store may be full several times
}  // namespace

ReplicatedCoordinator::ReplicatedCoordinator(World& world, std::uint32_t of, std::uint32_t at)
    : CoordinatorProcess(world.next_number(), of, at, world.chance("coordinator", of), world.history()), world_(world) {
  membership::ReplicatedCoordinator::Options options{.job = world.job_to_start(of),
                                                     .name = fmt::format("c{}", of),
                                                     .address = fmt::format("coordinator {}", of),
                                                     .instance = instance,
                                                     .per_snapshot = 5 + random.pick(60),
                                                     .copied = world.copied(of),
                                                     .copied_job = 0,
                                                     .copied_landmark = world.landmark_of_copy(of)};
  machine_ = std::make_unique<membership::ReplicatedCoordinator>(std::move(options), world.now_at(machine));
}

void ReplicatedCoordinator::tick() { carry_out(machine_->on_tick(world_.now_at(machine))); }

void ReplicatedCoordinator::on_message(std::uint64_t link, const proto::FromNode& said) {
  proto::FromNode message = said;
  if (message.has_leader_view() && is_older(world_.shape.upgrade)) message.mutable_leader_view()->clear_job();
  welcome(world_, link, message);
  if (world_.planted(Plant::claim_without_majority) && message.has_leader_view() && world_.plant_due()) {
    proto::FromNode forged = message;
    auto& view = *forged.mutable_leader_view();
    view.set_lost(true);
    for (const auto& member : machine_->following().members()) {
      auto& host = *view.add_hosts();
      host.set_replica(member.replica.value);
      membership::RankSet all;
      all.add(0, world_.shape.ranks);
      all.to(host.mutable_ranks());
    }
    return carry_out(machine_->on_message(membership::NodeId(link), forged, world_.now_at(machine)));
  }
  const auto& up = message.rank_up();
  if (const auto* leads = decisions();
      leads != nullptr && message.has_rank_up() && world_.is_later(up) &&
      (up.heard_epoch() > leads->epoch().value || up.heard_committed() > leads->committed().value)) {
    world_.check_that_it_heard_them(up);
    if (!outdated_ || outdated_->term != machine_->leader().term())
      outdated_ = Outdated{machine_->leader().term(), leads->epoch(), leads->committed()};
  }
  carry_out(machine_->on_message(membership::NodeId(link), message, world_.now_at(machine)));
}

void ReplicatedCoordinator::on_link_lost(std::uint64_t link) {
  carry_out(machine_->on_node_lost(membership::NodeId(link), world_.now_at(machine)));
}

void ReplicatedCoordinator::on_answer(const membership::StoreAnswer& answer) {
  carry_out(machine_->on_answer(answer, world_.now_at(machine)));
}

void ReplicatedCoordinator::carry_out(membership::ReplicatedCoordinator::Actions actions) {
  if (actions.failed && world_.may_give_up(number)) return;
  if (actions.failed)
    return world_.checker().violate("no-garbage", fmt::format("{} gives up: {}", describe(), actions.failed->message));
  if (const auto* leads = decisions();
      leads != nullptr && outdated_ && outdated_->term == machine_->leader().term() &&
      (leads->epoch() != outdated_->epoch || leads->committed() != outdated_->committed))
    world_.checker().violate("one-decision", "who has heard of later decisions than its store's decides");
  check_store(actions);
  for (const auto& note : actions.notes) world_.note("c{}: {}", number, note.text);
  if (actions.copy_from) world_.copy_from(number, actions.copy_from->snapshot().position());
  for (const auto& record : actions.copy) world_.on_copied(number, record);
  if (actions.request) {
    world_.store().submit(number, instance, *actions.request);
    // An answer that is none: what was to be durable is on its way.
    if ((world_.planted(Plant::send_before_durable) &&
         actions.request->kind == membership::StoreRequest::Kind::append && world_.plant_due()) ||
        (world_.planted(Plant::answer_unconfirmed) && actions.request->kind == membership::StoreRequest::Kind::renew))
      world_.answer_coordinator(instance, Duration(1),
                                {.outcome = membership::StoreAnswer::Outcome::done, .error = {}, .leader = {}});
  }
  if (!actions.send.empty() || !actions.close.empty()) world_.check_output(*this, actions);
  for (auto& [nodes, message] : actions.send) {
    if (message.has_leads() && is_older(world_.shape.upgrade)) message.mutable_leads()->clear_job();
    for (auto node : nodes) world_.to_caller(node.value, message);
  }
  for (const auto& node : actions.close) world_.drop_link(node.value);
}

// Whatever the store does, it is not to be asked for the lead all the time, nor is the log to be full of it.
void ReplicatedCoordinator::check_store(const membership::ReplicatedCoordinator::Actions& actions) {
  const auto too_many = [now = world_.now()](std::deque<TimePoint>& all, std::size_t most, Duration within) {
    all.push_back(now);
    if (all.size() <= most) return false;
    const bool found = now - all.front() < within;
    all.pop_front();
    return found;
  };
  const Duration silence = world_.job.silence;
  if (actions.request && actions.request->kind == membership::StoreRequest::Kind::claim &&
      too_many(claims_, kClaims, kWithin * silence))
    world_.checker().violate("progress", fmt::format("{} claims the lead more than {} times within {} silences",
                                                     describe(), kClaims, kWithin));
  for (const auto& note : actions.notes)
    if (note.text.starts_with("the store ") && too_many(lines_, kLines, kWithin * silence))
      world_.checker().violate("progress", fmt::format("{} logs more than {} lines about the store within {} silences",
                                                       describe(), kLines, kWithin));
}

std::string ReplicatedCoordinator::describe() const {
  return fmt::format("c{} {} in term {}, knows {} records", number,
                     machine_->leading() != nullptr ? "leads" : "follows", machine_->leader().term(),
                     machine_->position());
}

}  // namespace rejoin::sim
