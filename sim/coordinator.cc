#include "sim/coordinator.h"

#include <fmt/format.h>

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
                         fmt::join(status.links(), " "), status.caught_up() ? ", caught up" : "");
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

Coordinator::Coordinator(World& world, std::uint32_t at, const std::vector<proto::LogRecord>& log)
    : Process(world.next_number(), at, world.chance("coordinator")), world_(world), machine_(world.job_to_start()) {
  if (auto recovered = machine_.recover(log, world_.now_at(machine)); !recovered)
    world_.checker().violate("no-garbage",
                             fmt::format("the coordinator can't read its own log: {}", recovered.error().message));
}

void Coordinator::tick() { carry_out(machine_.on_tick(world_.now_at(machine))); }

void Coordinator::on_message(std::uint64_t link, const proto::FromNode& message) {
  if (world_.options_.trace && !message.has_heartbeat())
    world_.remark(fmt::format("link {}: {}", link, brief(message)));
  carry_out(machine_.on_message(membership::NodeId(link), message, world_.now_at(machine)));
  if (message.has_replica_status() && !ended) world_.on_replica_status();
}

void Coordinator::on_link_lost(std::uint64_t link) {
  carry_out(machine_.on_node_lost(membership::NodeId(link), world_.now_at(machine)));
}

void Coordinator::carry_out(membership::Actions actions) {
  if (world_.append(actions.append) == World::Append::failed) return;
  for (const auto& note : actions.notes) world_.note("coordinator: {}", note.text);
  if (stopped) in_append_ = std::move(actions);  // its disk is slow
  else send(actions);
}

void Coordinator::on_resumed() {
  if (in_append_) send(*std::exchange(in_append_, std::nullopt));
}

void Coordinator::send(const membership::Actions& actions) {
  for (const auto& [node, message] : actions.send) world_.to_daemon(node.value, message);
  for (const auto& node : actions.close) world_.drop_link(node.value);
}

}  // namespace rejoin::sim
