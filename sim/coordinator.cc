#include "sim/coordinator.h"

#include "sim/world.h"

namespace rejoin::sim {

Coordinator::Coordinator(World& world, std::uint32_t at, const std::vector<proto::LogRecord>& log)
    : Process(world.next_number(), at, world.chance("coordinator")), world_(world), machine_(world.job_to_start()) {
  if (auto recovered = machine_.recover(log, world_.now_at(machine)); !recovered)
    world_.checker().violate("no-garbage",
                             fmt::format("the coordinator can't read its own log: {}", recovered.error().message));
}

void Coordinator::tick() {
  carry_out(machine_.on_tick(world_.now_at(machine)));
  if (const auto step = machine_.wants_roll_back(); step && !ended) world_.allow_roll_back(*step);
}

void Coordinator::on_message(std::uint64_t link, const proto::FromNode& message) {
  carry_out(machine_.on_message(membership::NodeId(link), message, world_.now_at(machine)));
}

void Coordinator::on_link_lost(std::uint64_t link) {
  carry_out(machine_.on_node_lost(membership::NodeId(link), world_.now_at(machine)));
}

void Coordinator::carry_out(membership::Actions actions) {
  if (world_.append(actions.append) == World::Append::failed) return;
  for (const auto& line : actions.notes) world_.note("coordinator: {}", line);
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
