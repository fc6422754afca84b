// What each fault does to the simulated cluster.
#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

Duration World::slowness(std::uint32_t replica, std::uint32_t rank) const {
  auto found = slow_until_.find({replica, rank});
  return found != slow_until_.end() && found->second > now() ? Duration(250ms) : Duration{};
}

void World::happen(const Fault& fault) {
  count(fmt::format("fault: {}", to_string(fault.kind)));
  note("FAULT {} (replica {} rank {}, {:.1f} ms)", to_string(fault.kind), fault.replica, fault.rank,
       milliseconds(fault.lasting));
  Trainer* trainer = trainers_[fault.replica][fault.rank].get();
  Daemon* daemon = daemons_[fault.replica].get();
  const TimePoint until = now() + fault.lasting;
  switch (fault.kind) {
    case FaultKind::kill_trainer: return kill_trainer(fault.replica, fault.rank, "killed");
    case FaultKind::hang_trainer:
      if (trainer == nullptr || trainer->stopped) return;
      trainer->stopped = true;
      for (const auto* rail : trainer->rails) fabric_.stop(*rail);
      return after_of(*trainer, fault.lasting, [this, trainer] {
        trainer->stopped = false;
        for (const auto* rail : trainer->rails) fabric_.resume(*rail);
        if (trainer->connection.value == 0) trainer->look_for_daemon();
        wake(*trainer);
      });
    case FaultKind::slow_trainer: slow_until_[{fault.replica, fault.rank}] = until; return;
    case FaultKind::kill_all:
      for (std::uint32_t r = 0; r < options_.replicas; ++r)
        for (std::uint32_t i = 0; i < options_.ranks; ++i) kill_trainer(r, i, "killed with all others");
      return;
    case FaultKind::power_loss: kill_daemon(fault.replica); [[fallthrough]];
    case FaultKind::kill_replica:
      for (std::uint32_t i = 0; i < options_.ranks; ++i) kill_trainer(fault.replica, i, "killed with its replica");
      return;
    case FaultKind::kill_daemon: return kill_daemon(fault.replica);
    case FaultKind::kill_coordinator: return kill_coordinator("killed");
    case FaultKind::crash_in_append: crash_in_append_ = coordinator_ != nullptr; return;
    case FaultKind::disk_full: disk_full_ = true; return;
    case FaultKind::partition:
      down_blocked_[fault.replica] = std::max(down_blocked_[fault.replica], until);
      [[fallthrough]];
    case FaultKind::one_way_partition: up_blocked_[fault.replica] = std::max(up_blocked_[fault.replica], until); return;
    case FaultKind::cut_ring:
      if (trainer != nullptr)
        for (const auto* rail : trainer->rails) fabric_.cut(*rail);
      return;
    case FaultKind::cut_stream:
      if (daemon != nullptr)
        for (const auto* rail : daemon->rails) fabric_.cut(*rail);
      return;
    case FaultKind::lose_rail:
      if (trainer != nullptr) fabric_.cut(*trainer->rails[pick(trainer->rails.size())]);
      if (daemon != nullptr) fabric_.cut(*daemon->rails[pick(daemon->rails.size())]);
      return;
    case FaultKind::slow_link: {
      const Duration extra = between(500us, 60ms);
      const std::uint64_t ways = pick(3);  // out, in, or both: most links that are slow are so one way
      const Duration out = ways != 1 ? extra : Duration{}, in = ways != 0 ? extra : Duration{};
      slow_links_[fault.replica] = {out, in, until};
      const auto slow = [&](const Rails& rails) {
        for (const auto* rail : rails) fabric_.slow(*rail, out, in, until);
      };
      if (daemon != nullptr) slow(daemon->rails);
      for (const auto& one : trainers_[fault.replica])
        if (one) slow(one->rails);
      return;
    }
    case FaultKind::damage:
      if (daemon != nullptr) fabric_.damage_next_write(*daemon->rails[pick(daemon->rails.size())]);
      return;
    case FaultKind::damage_at_rest: damage_at_rest_[fault.replica] = true; return;
    case FaultKind::pause:
      clock_.advance(fault.lasting);
      faults_end_ += fault.lasting;
      return;
  }
}

}  // namespace rejoin::sim
