#include "sim/relay.h"

#include <fmt/format.h>

#include "membership/greeting.h"
#include "sim/world.h"

namespace rejoin::sim {

using membership::NodeId;

Relay::Relay(World& world, std::uint32_t of, std::uint32_t at)
    : Process(world.next_number(), at, world.chance("relay", of)),
      number(of),
      world_(world),
      machine_(fmt::format("relay {}", of), world.job.silence),
      uplink_(world, *this, world.caller_of_relay(of), world.coordinator_stations(), fmt::format("relay {}", of),
              {.up =
                   [this] {
                     world_.introduces(*this, world_.caller_of_relay(number));
                     carry_out(machine_.on_coordinator_up(local_now()));
                   },
               .down = [this] { carry_out(machine_.on_coordinator_down(local_now())); },
               .message =
                   [this](const proto::ToNode& message) {
                     if (message.has_introduce()) world_.introduces(*this, world_.caller_of_relay(number));
                     carry_out(machine_.on_coordinator_message(message, local_now()));
                   },
               .hosts = [this](proto::LeaderView& view) { machine_.write_hosts(view); },
               .said = [](proto::FromNode message) { return message; }}) {}

TimePoint Relay::local_now() const { return world_.now_at(machine); }

void Relay::tick() {
  uplink_.tick();
  uplink_.call_all();
  carry_out(machine_.on_tick(local_now()));
  if (machine_.coordinator_up()) uplink_.check(machine_.coordinator_heard());
}

// As NodeListener does.
void Relay::on_message(std::uint64_t link, const proto::FromNode& message) {
  if (message.has_hello())
    if (const auto answer = membership::greet(message.hello(), "a node").answer)
      world_.send(*this, [this, link, answer = *answer] { world_.to_caller(link, answer); });
  carry_out(machine_.on_node_message(NodeId(link), message, local_now()));
}

void Relay::on_link_lost(std::uint64_t link) { carry_out(machine_.on_node_lost(NodeId(link), local_now())); }

void Relay::carry_out(const membership::Relay::Actions& actions) {
  for (const auto& note : actions.notes) world_.note("relay {}: {}", number, note.text);
  for (const auto& message : actions.to_coordinator) uplink_.send(message);
  for (const auto& [nodes, message] : actions.to_nodes)
    for (auto node : nodes)
      world_.send(*this, [this, node, message = message] { world_.to_caller(node.value, message); });
  for (auto node : actions.close) world_.send(*this, [this, node] { world_.drop_link(node.value); });
}

}  // namespace rejoin::sim
