#include "sim/coordinator.h"

#include <fmt/format.h>

#include "membership/greeting.h"
#include "sim/world.h"

namespace rejoin::sim {

namespace {

// For traces.
std::string brief(const proto::FromNode& message) {
  switch (message.kind_case()) {
    case proto::FromNode::kRankUp: {
      const auto& up = message.rank_up();
      return fmt::format(
          "replica {} rank {} is up: instance {}, incarnation {}, version {}, reduced step {} in epoch {}",
          up.replica(), up.rank(), up.instance(), up.incarnation(), up.version(), up.reduced_step(),
          up.reduced_epoch());
    }
    case proto::FromNode::kRankDown: {
      const auto& down = message.rank_down();
      return fmt::format("replica {} rank {} is down: instance {}, {}{}", down.replica(), down.rank(), down.instance(),
                         down.reason(), down.ended() ? ", ended" : "");
    }
    case proto::FromNode::kReduced: {
      const auto& done = message.reduced();
      return fmt::format("replica {} ({}) ranks {} reduced step {} in epoch {}", done.replica(), done.incarnation(),
                         membership::RankSet(done.ranks(), ~0u).text(), done.step(), done.epoch());
    }
    case proto::FromNode::kReplicaStatus: {
      const auto& status = message.replica_status();
      return fmt::format("replica {} ({}): connected with {}{}", status.replica(), status.incarnation(),
                         membership::Incarnations(status.links(), ~std::uint64_t{0}).text(),
                         status.caught_up() ? ", caught up" : "");
    }
    case proto::FromNode::kAccusation: {
      const auto& accusation = message.accusation();
      return fmt::format("replica {} rank {} accuses replica {} in epoch {}: {}{}", accusation.replica(),
                         accusation.rank(), accusation.suspect(), accusation.epoch(), accusation.what(),
                         accusation.only_waiting() ? " (it only waits)" : "");
    }
    default: return "a message of another kind";
  }
}

}  // namespace

void CoordinatorProcess::welcome(World& world, std::uint64_t link, const proto::FromNode& message) {
  if (!message.has_hello() || is_older(world.shape.upgrade)) return;
  if (const auto answer = membership::greet(message.hello(), "a node").answer) world.to_caller(link, *answer);
}

Coordinator::Coordinator(World& world, std::uint32_t at, const std::vector<proto::LogRecord>& log)
    : CoordinatorProcess(world.next_number(), 0, at, world.chance("coordinator"), world.history()),
      world_(world),
      machine_(world.job_to_start(0)) {
  recover(log);
  if (is_older(world.shape.upgrade)) machine_.set_protocol_of_coordinators(membership::Spoken());
}

// From its log as it is, or compacted at some record; both must lead to the same.
void Coordinator::recover(const std::vector<proto::LogRecord>& log) {
  const auto take_up = [&](membership::Coordinator& taking, const std::vector<proto::LogRecord>& records) {
    if (auto recovered = taking.recover(records, world_.now_at(machine)); !recovered)
      world_.checker().violate("no-garbage",
                               fmt::format("the coordinator can't read its own log: {}", recovered.error().message));
  };
  if (log.size() < 2 || !random.one_in(2)) return take_up(machine_, log);
  world_.count("compacted log");
  membership::Coordinator before(world_.job), whole(machine_);
  auto from = log.begin() + static_cast<std::ptrdiff_t>(1 + random.pick(log.size() - 1));
  // A commit and an epoch that begins with it are written as one: no coordinator compacts its log between them.
  if (from->has_epoch() && from->epoch().fresh()) ++from;
  take_up(before, {log.begin(), from});
  std::vector<proto::LogRecord> compacted{before.snapshot()};
  compacted.insert(compacted.end(), from, log.end());
  take_up(machine_, compacted);
  take_up(whole, log);
  if (!machine_.has_recovered_like(whole))
    world_.checker().violate("one-decision", fmt::format("a log of {} records, compacted at {}, leads to another state",
                                                         log.size(), from - log.begin()));
}

void Coordinator::tick() { carry_out(machine_.on_tick(world_.now_at(machine))); }

void Coordinator::on_message(std::uint64_t link, const proto::FromNode& message) {
  if (world_.options_.trace && !message.has_heartbeat())
    world_.remark(fmt::format("link {}: {}", link, brief(message)));
  welcome(world_, link, message);
  if (message.has_rank_up() && world_.is_later(message.rank_up())) {
    knows_of_later_decisions_ = true;
    world_.check_that_it_heard_them(message.rank_up());
  }
  carry_out(machine_.on_message(membership::NodeId(link), message, world_.now_at(machine)));
  if (message.has_replica_status() && !ended) world_.on_replica_status();
}

void Coordinator::on_link_lost(std::uint64_t link) {
  carry_out(machine_.on_node_lost(membership::NodeId(link), world_.now_at(machine)));
}

void Coordinator::carry_out(membership::Actions actions) {
  for (const auto& record : actions.append)
    if (knows_of_later_decisions_ && (record.has_epoch() || record.has_committed() || record.has_rolled_back()))
      world_.checker().violate("one-decision", "who has heard of later decisions than its log's decides");
  if (world_.append(actions.append) == World::Append::failed) return;
  if (!actions.append.empty() && random.one_in(64)) world_.compare_with_log(machine_.snapshot(), world_.log().size());
  for (const auto& note : actions.notes) world_.note("coordinator: {}", note.text);
  if (stopped) in_append_ = std::move(actions);  // its disk is slow
  else send(actions);
}

void Coordinator::on_resumed() {
  if (in_append_) send(*std::exchange(in_append_, std::nullopt));
}

void Coordinator::send(const membership::Actions& actions) {
  for (const auto& [nodes, message] : actions.send)
    for (auto node : nodes) world_.to_caller(node.value, message);
  for (const auto& node : actions.close) world_.drop_link(node.value);
}

}  // namespace rejoin::sim
