// The connections between daemons and coordinator: in order, late, cut, or never answered. And the rooms that nodes are
// in, with what lies between; and what coding they are given.
#include <algorithm>
#include <numeric>
#include <set>

#include "base/deadlines.h"
#include "sim/history_mark.h"
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

std::optional<std::uint32_t> World::relay_of(std::uint32_t node) const {
  Random random = chance("relay of a node", node);
  if (shape.relays == 0 || random.one_in(5)) return std::nullopt;
  return static_cast<std::uint32_t>(random.pick(shape.relays));
}

std::vector<std::uint32_t> World::coordinator_stations() const {
  std::vector<std::uint32_t> all(shape.coordinators);
  std::iota(all.begin(), all.end(), 0u);
  return all;
}

std::vector<std::uint32_t> World::stations_of(std::uint32_t node) const {
  if (const auto relay = relay_of(node)) return {shape.coordinators + *relay};
  return coordinator_stations();
}

Calling World::caller(std::uint32_t number) {
  if (number < nodes()) {
    Daemon* daemon = daemons_[number].get();
    return daemon != nullptr ? Calling{daemon, &daemon->uplink()} : Calling{};
  }
  Relay* relay = relays_[number - nodes()].get();
  return relay != nullptr ? Calling{relay, &relay->uplink()} : Calling{};
}

Listening World::station(std::uint32_t number) {
  if (number < shape.coordinators) return {coordinators_[number].get(), coordinators_[number].get()};
  Relay* relay = relays_[number - shape.coordinators].get();
  return {relay, relay};
}

// What a fault does to the connections of a node may be done to those of its relay.
std::uint32_t World::draw_caller(std::uint32_t node, Random& random) const {
  const auto relay = relay_of(node);
  return relay && random.one_in(2) ? caller_of_relay(*relay) : node;
}

Duration World::control_delay(std::uint32_t caller, std::uint32_t station, bool up) {
  TimePoint blocked = up ? up_blocked_[caller] : down_blocked_[caller];
  if (auto cut = parted_.find({caller, station}); cut != parted_.end()) blocked = std::max(blocked, cut->second);
  Duration delay = control_random_[caller].between(10us, 310us);
  if (const SlowLink& link = slow_links_[caller]; link.until > now()) delay += up ? link.out : link.in;
  return blocked > now() ? blocked - now() + delay : delay;
}

// What is sent over it now; none: it never arrives. What was lost while nothing passed is sent again a while later.
std::optional<Duration> World::delay_on(const Link& link, bool up) {
  const Duration delay = control_delay(link.caller, link.station, up);
  if (link.forgotten_until <= now()) return delay;
  if (link.forgotten_until == TimePoint::max()) return std::nullopt;
  return link.forgotten_until - now() + control_random_[link.caller].between({}, job.silence / 8) + delay;
}

// Where it is refused: 0. Where nothing answers, it is called again beside that, as Upstream does.
std::uint64_t World::connect(std::uint32_t from, std::uint32_t to) {
  const Listening listening = station(to);
  if (listening.process == nullptr) return 0;
  const std::uint64_t number = next_number();
  Link& made = links_[number];
  made.caller = from;
  made.station = to;
  TimePoint open = std::max(up_blocked_[from], down_blocked_[from]);
  if (auto cut = parted_.find({from, to}); cut != parted_.end()) open = std::max(open, cut->second);
  Duration asked{};
  while (now() + asked < open) asked += deadlines::kCallAgain.of(job.silence);
  deliver(*listening.process, in_order(made.last_up, asked + control_delay(from, to, true)), [this, number] {
    auto found = links_.find(number);
    if (found == links_.end()) return;  // it gave up meanwhile
    Link& link = found->second;
    link.accepted = true;
    if (const Calling calling = caller(link.caller); calling.process != nullptr)
      deliver(*calling.process, in_order(link.last_down, control_delay(link.caller, link.station, false)),
              [calling, number] { calling.uplink->on_link_up(number); });
  });
  return number;
}

void World::drop_link(std::uint64_t number) {
  auto gone = links_.extract(number);
  if (gone.empty()) return;
  const Calling calling = caller(gone.mapped().caller);
  if (calling.process == nullptr) return;
  const Duration noticed = supervisor_random_[nodes()].between(10us, 1ms);
  const auto delay = delay_on(gone.mapped(), false);
  if (delay) deliver(*calling.process, noticed + *delay, [calling, number] { calling.uplink->on_link_down(number); });
}

void World::drop_links_to(std::uint32_t station) {
  std::vector<std::uint64_t> its;
  for (const auto& [link, of] : links_)
    if (of.station == station) its.push_back(link);
  for (auto link : its) drop_link(link);
}

void World::close_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  const auto delay = delay_on(found->second, true);
  if (!delay) return;
  const Listening at = station(found->second.station);
  deliver(*at.process, in_order(found->second.last_up, *delay), [this, number, at] {
    if (links_.erase(number) > 0) at.station->on_link_lost(number);
  });
}

void World::to_station(std::uint64_t number, proto::FromNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  const auto delay = delay_on(found->second, true);
  if (!delay) return;
  const Listening at = station(found->second.station);
  deliver(*at.process, in_order(found->second.last_up, *delay), [this, number, at, message = std::move(message)] {
    auto open = links_.find(number);
    if (open != links_.end() && !open->second.reset) at.station->on_message(number, message);
  });
}

void World::to_caller(std::uint64_t number, proto::ToNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  const Calling to = caller(found->second.caller);
  if (to.process == nullptr) return;
  const std::uint32_t from = found->second.station;
  const bool decides = from < shape.coordinators && coordinators_[from]->of_the_job();
  if (decides && message.has_evicted()) check_that_nobody_is_sent_away(message.evicted());
  if (decides && message.has_plan() && checkers_.size() > 1)
    mark(*message.mutable_plan(), coordinators_[from]->history);
  if (const auto& its = message.registered(); message.has_registered() && from < shape.coordinators) {
    const PlaceInIncarnation place{its.job() + (decides ? coordinators_[from]->history << 48 : 0), its.replica(),
                                   its.rank(), its.incarnation()};
    if (owners_.emplace(place, its.instance()).first->second != its.instance())
      checker().violate("one-decision", fmt::format("two processes are replica {} rank {} in incarnation {}",
                                                    its.replica(), its.rank(), its.incarnation()));
  }
  const auto delay = delay_on(found->second, false);
  if (!delay) return;
  deliver(*to.process, in_order(found->second.last_down, *delay), [this, to, number, message = std::move(message)] {
    auto open = links_.find(number);
    if (open == links_.end() || !open->second.reset) to.uplink->on_control_message(number, message);
  });
}

// A connection is reset on its way: what has not been delivered is lost, and each end hears of it in its own time.
void World::reset_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end() || !found->second.accepted) return;
  found->second.reset = true;
  Random& random = control_random_[found->second.caller];
  const Listening at = station(found->second.station);
  deliver(*at.process, random.of_any_size(1us, 50ms), [this, number, at] {
    if (links_.erase(number) > 0) at.station->on_link_lost(number);
  });
  if (const Calling calling = caller(found->second.caller); calling.process != nullptr)
    deliver(*calling.process, random.of_any_size(1us, 50ms),
            [calling, number] { calling.uplink->on_link_down(number); });
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
