// Data networks that are cut while all processes live and are heard.
#include <algorithm>
#include <set>

#include "sim/world.h"

namespace rejoin::sim {

namespace {

// In one of four such faults of a larger job two replicas are cut from all others together.
std::set<std::uint32_t> who_is_cut(const Fault& fault, std::uint32_t replicas) {
  std::set<std::uint32_t> cut{fault.replica};
  if (replicas > 3 && fault.detail % 4 == 3)
    cut.insert((fault.replica + 1 + static_cast<std::uint32_t>(fault.detail / 4 % (replicas - 1))) % replicas);
  return cut;
}

}  // namespace

// Before what the fault does is felt. Of ranks whose daemon is an older one it isn't known what they have no connection
// with: then it may be another one that is put out.
void World::see_who_is_cut(const Fault& fault) {
  const auto is_older = [&](const auto& daemon) { return daemon != nullptr && daemon->is_older(shape.upgrade); };
  isolation_.end();
  if (fault.kind != FaultKind::cut_replica || !is_calm() || shape.replicas < 3) return;
  if (who_is_cut(fault, shape.replicas).size() > 1) return count("two replicas cut from all others");
  if (std::ranges::any_of(daemons_, is_older)) return count("replica cut from all others, some of before");
  const bool timed = !shape.evaluates && !shape.long_updates;
  isolation_.begin(fault.replica, shape.replicas, timed, now(), now() + fault.lasting);
  count("replica cut from all others");
}

void World::cut_replica(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const std::uint64_t ways = random.pick(4);  // 0: what they send, 1: what is sent to them; otherwise both
  const auto cut = who_is_cut(fault, shape.replicas);
  for (auto one : cut)
    for (std::uint32_t other = 0; other < shape.replicas; ++other) {
      if (cut.contains(other)) continue;
      if (ways != 1) fabric_.part(one, other, until);
      if (ways != 0) fabric_.part(other, one, until);
    }
}

void World::check_isolation(const std::optional<std::string>& wrong) {
  if (wrong) checker().violate("cut-alone", *wrong);
}

}  // namespace rejoin::sim
