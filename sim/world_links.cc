// The connections between daemons and coordinator: in order, late, cut, or never answered.
#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

Duration World::control_delay(std::uint32_t node, bool up) {
  const TimePoint blocked = up ? up_blocked_[node] : down_blocked_[node];
  Duration delay = control_random_[node].between(10us, 310us);
  if (const SlowLink& link = slow_links_[node]; link.until > now()) delay += up ? link.out : link.in;
  return blocked > now() ? blocked - now() + delay : delay;
}

// Where it is refused: 0. Where nothing answers, it is asked again after 1, 3 and 7 s, as Linux does.
std::uint64_t World::connect(Daemon& daemon) {
  if (!coordinator_) return 0;
  const std::uint64_t number = next_number();
  Link& made = links_[number];
  made.node = daemon.node;
  const TimePoint open = std::max(up_blocked_[daemon.node], down_blocked_[daemon.node]);
  Duration asked{};
  for (Duration wait = 1s; now() + asked < open; wait *= 2) asked += wait;
  deliver(*coordinator_, in_order(made.last_up, asked + control_delay(daemon.node, true)), [this, number] {
    auto found = links_.find(number);
    if (found == links_.end()) return;  // it gave up meanwhile
    Link& link = found->second;
    link.accepted = true;
    if (Daemon* connecting = daemons_[link.node].get(); connecting != nullptr)
      deliver(*connecting, in_order(link.last_down, control_delay(link.node, false)),
              [connecting, number] { connecting->on_link_up(number); });
  });
  return number;
}

void World::drop_link(std::uint64_t number) {
  auto gone = links_.extract(number);
  if (gone.empty()) return;
  const std::uint32_t node = gone.mapped().node;
  Daemon* daemon = daemons_[node].get();
  if (daemon == nullptr) return;
  const Duration noticed = supervisor_random_[nodes()].between(10us, 1ms);
  deliver(*daemon, noticed + control_delay(node, false), [daemon, number] { daemon->on_link_down(number); });
}

void World::close_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  deliver(*coordinator_, in_order(found->second.last_up, control_delay(found->second.node, true)), [this, number] {
    if (links_.erase(number) > 0) coordinator_->on_link_lost(number);
  });
}

void World::to_coordinator(std::uint64_t number, proto::FromNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  deliver(*coordinator_, in_order(found->second.last_up, control_delay(found->second.node, true)),
          [this, number, message = std::move(message)] {
            auto open = links_.find(number);
            if (open != links_.end() && !open->second.reset) coordinator_->on_message(number, message);
          });
}

void World::to_daemon(std::uint64_t number, proto::ToNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  const std::uint32_t node = found->second.node;
  Daemon* daemon = daemons_[node].get();
  if (daemon == nullptr) return;
  deliver(*daemon, in_order(found->second.last_down, control_delay(node, false)),
          [this, daemon, number, message = std::move(message)] {
            auto open = links_.find(number);
            if (open == links_.end() || !open->second.reset) daemon->on_control_message(number, message);
          });
}

// A connection is reset on its way: what has not been delivered is lost, and each end hears of it in its own time.
void World::reset_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end() || !found->second.accepted) return;
  found->second.reset = true;
  Random& random = control_random_[found->second.node];
  deliver(*coordinator_, random.of_any_size(1us, 50ms), [this, number] {
    if (links_.erase(number) > 0) coordinator_->on_link_lost(number);
  });
  if (Daemon* daemon = daemons_[found->second.node].get())
    deliver(*daemon, random.of_any_size(1us, 50ms), [daemon, number] { daemon->on_link_down(number); });
}

}  // namespace rejoin::sim
