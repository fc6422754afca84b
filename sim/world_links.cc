// The connections between daemons and coordinator: in order, late, cut, or never answered. And the rooms that nodes are
// in, with what lies between; and what coding they are given.
#include <algorithm>
#include <set>

#include "base/deadlines.h"
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

Duration World::control_delay(std::uint32_t node, std::uint32_t coordinator, bool up) {
  TimePoint blocked = up ? up_blocked_[node] : down_blocked_[node];
  if (auto cut = parted_.find({node, coordinator}); cut != parted_.end()) blocked = std::max(blocked, cut->second);
  Duration delay = control_random_[node].between(10us, 310us);
  if (const SlowLink& link = slow_links_[node]; link.until > now()) delay += up ? link.out : link.in;
  return blocked > now() ? blocked - now() + delay : delay;
}

// What is sent over it now; none: it never arrives. What was lost while nothing passed is sent again a while later.
std::optional<Duration> World::delay_on(const Link& link, bool up) {
  const Duration delay = control_delay(link.node, link.coordinator, up);
  if (link.forgotten_until <= now()) return delay;
  if (link.forgotten_until == TimePoint::max()) return std::nullopt;
  return link.forgotten_until - now() + control_random_[link.node].between({}, job.silence / 8) + delay;
}

// Where it is refused: 0. Where nothing answers, it is called again beside that, as Upstream does.
std::uint64_t World::connect(Daemon& daemon, std::uint32_t coordinator) {
  if (!coordinators_[coordinator]) return 0;
  const std::uint64_t number = next_number();
  Link& made = links_[number];
  made.node = daemon.node;
  made.coordinator = coordinator;
  TimePoint open = std::max(up_blocked_[daemon.node], down_blocked_[daemon.node]);
  if (auto cut = parted_.find({daemon.node, coordinator}); cut != parted_.end()) open = std::max(open, cut->second);
  Duration asked{};
  while (now() + asked < open) asked += deadlines::kCallAgain.of(job.silence);
  deliver(*coordinators_[coordinator], in_order(made.last_up, asked + control_delay(daemon.node, coordinator, true)),
          [this, number] {
            auto found = links_.find(number);
            if (found == links_.end()) return;  // it gave up meanwhile
            Link& link = found->second;
            link.accepted = true;
            if (Daemon* connecting = daemons_[link.node].get(); connecting != nullptr)
              deliver(*connecting, in_order(link.last_down, control_delay(link.node, link.coordinator, false)),
                      [connecting, number] { connecting->on_link_up(number); });
          });
  return number;
}

void World::drop_link(std::uint64_t number) {
  auto gone = links_.extract(number);
  if (gone.empty()) return;
  Daemon* daemon = daemons_[gone.mapped().node].get();
  if (daemon == nullptr) return;
  const Duration noticed = supervisor_random_[nodes()].between(10us, 1ms);
  const auto delay = delay_on(gone.mapped(), false);
  if (delay) deliver(*daemon, noticed + *delay, [daemon, number] { daemon->on_link_down(number); });
}

void World::close_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  CoordinatorProcess* at = coordinators_[found->second.coordinator].get();
  const auto delay = delay_on(found->second, true);
  if (!delay) return;
  deliver(*at, in_order(found->second.last_up, *delay), [this, number, at] {
    if (links_.erase(number) > 0) at->on_link_lost(number);
  });
}

void World::to_coordinator(std::uint64_t number, proto::FromNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  CoordinatorProcess* at = coordinators_[found->second.coordinator].get();
  const auto delay = delay_on(found->second, true);
  if (!delay) return;
  deliver(*at, in_order(found->second.last_up, *delay), [this, number, at, message = std::move(message)] {
    auto open = links_.find(number);
    if (open != links_.end() && !open->second.reset) at->on_message(number, message);
  });
}

void World::to_daemon(std::uint64_t number, proto::ToNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  const std::uint32_t node = found->second.node;
  Daemon* daemon = daemons_[node].get();
  if (daemon == nullptr) return;
  if (const auto& its = message.registered(); message.has_registered()) {
    const PlaceInIncarnation place{its.replica(), its.rank(), its.incarnation()};
    if (owners_.emplace(place, its.instance()).first->second != its.instance())
      checker_.violate("one-decision", fmt::format("two processes are replica {} rank {} in incarnation {}",
                                                   its.replica(), its.rank(), its.incarnation()));
  }
  const auto delay = delay_on(found->second, false);
  if (!delay) return;
  deliver(*daemon, in_order(found->second.last_down, *delay), [this, daemon, number, message = std::move(message)] {
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
  CoordinatorProcess* at = coordinators_[found->second.coordinator].get();
  deliver(*at, random.of_any_size(1us, 50ms), [this, number, at] {
    if (links_.erase(number) > 0) at->on_link_lost(number);
  });
  if (Daemon* daemon = daemons_[found->second.node].get())
    deliver(*daemon, random.of_any_size(1us, 50ms), [daemon, number] { daemon->on_link_down(number); });
}

// What lies between lets nothing through any more of this connection, and tells neither end.
void World::forget_link(std::uint64_t number, TimePoint until) {
  auto found = links_.find(number);
  if (found == links_.end() || !found->second.accepted) return;
  found->second.forgotten_until = std::max(found->second.forgotten_until, until);
  disturb(job.silence);
  faults_end_ = std::max(faults_end_, now() + job.silence);
}

// ---- rooms

std::uint32_t World::room_of(std::uint32_t node) const {
  constexpr std::uint64_t rooms = 4;
  if (!shape.located) return 0;
  return static_cast<std::uint32_t>(chance("room", node / shape.nodes).pick(rooms));
}

std::string World::location_of(std::uint32_t node) const {
  const bool silent = shape.measured || (chance("says no location").one_in(4) && node / shape.nodes == 1);
  return shape.located && !silent ? fmt::format("dc/room{}/node{}", room_of(node), node) : "";
}

// Of an epoch whose contributors all say where they are, or none does: from room to room in the order that it has, at
// the least, and if members stood by their numbers.
void World::count_crossings(const proto::LogRecord::EpochBegun& begun) {
  std::vector<std::uint32_t> ring;
  for (const auto& member : begun.members()) {
    if (member.catching_up()) continue;
    if (!shape.measured && location_of(node_of(member.replica(), 0)).empty()) return;
    ring.push_back(member.replica());
  }
  const auto crossings = [&] {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < ring.size(); ++i)
      all += room_of(node_of(ring[i], 0)) != room_of(node_of(ring[(i + 1) % ring.size()], 0)) ? 1 : 0;
    return all;
  };
  std::set<std::uint32_t> rooms;
  for (auto replica : ring) rooms.insert(room_of(node_of(replica, 0)));
  count("rooms crossed", crossings());
  count("rooms to cross", rooms.size() < 2 ? 0 : rooms.size());
  std::ranges::sort(ring);
  count("rooms crossed by number", crossings());
}

// Who is of the release before knows of no coding.
ftar::Coding World::coding_of(const Process& process) const {
  using ftar::Coding;
  constexpr Coding of_each[] = {Coding::off, Coding::eight, Coding::four};
  if (process.is_older(shape.upgrade)) return Coding::off;
  switch (shape.codings) {
    case Codings::off: return Coding::off;
    case Codings::eight: return Coding::eight;
    case Codings::four: return Coding::four;
    case Codings::automatic: return Coding::automatic;
    case Codings::mixed: return of_each[chance("coding", process.instance).pick(std::size(of_each))];
  }
  return Coding::off;
}

// So that a link is slow when it takes longer than it does as a rule, and fast when it takes less.
double World::coding_rate() const { return 5120 / seconds(shape.slowest); }

}  // namespace rejoin::sim
