// The other members, and who of them is reached; what the trainer may take its time with.
#include <algorithm>
#include <set>

#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/text.h"
#include "membership/link_rates.h"
#include "rejoin/driver.h"

namespace rejoin {

namespace {

constexpr std::size_t kStepsToLearnFrom = 4;
constexpr int kFirstComputed = 8;

}  // namespace

// Of two, the newer one connects. A candidate does with all members, who don't know of it.
bool Driver::calls(const proto::Peer& peer) const {
  return peer.incarnation() < machine_.incarnation().value || calls_.contains(member_of(peer));
}

// It is tried again, without a word for each time: the coordinator's status has it for as long as it lasts. True: this
// is not the first time since there was a connection.
bool Driver::not_reached(const ftar::Member& member, const std::string& why) {
  const auto is_it = [&](const auto& peer) { return peer.incarnation() == member.incarnation.value; };
  const auto peer = std::ranges::find_if(peers(), is_it);
  if (peer == peers().end() || !to_be_linked(member)) return false;
  const auto [one, fresh] = unreached_.try_emplace(member.incarnation);
  if (!fresh) return true;
  one->second.set_replica(member.replica.value);
  one->second.set_incarnation(member.incarnation.value);
  one->second.set_rank(config_.rank);
  one->second.set_why(calls(*peer) ? fmt::format("{}: {}", peer->address(), why) : why);
  if (!machine_.member()) logger().warn("replica {} is not reached: {}", member.replica, one->second.why());
  report_links();
  return false;
}

void Driver::report_links() {
  proto::FromNode report;
  auto& links = *report.mutable_links();
  links.set_replica(config_.replica.value);
  links.set_rank(config_.rank);
  links.set_instance(config_.instance);
  membership::Incarnations connected;
  if (!links_) {
    for (const auto& peer : peers())
      if (ring_->connected(member_of(peer))) connected.insert(peer.incarnation());
  } else if (!machine_.member()) {  // of a member nobody needs to know
    for (const auto& member : *links_)
      if (ring_->connected(member)) connected.insert(member.incarnation.value);
  }
  connected.to(links.mutable_incarnations());
  for (const auto& [incarnation, one] : unreached_) *links.add_unreached() = one;
  // Not with each connection that a member makes, nor with each of those that one makes which is to become one.
  if (!machine_.member() && all_linked()) round_trips_reported_ = round_trips();
  round_trips_reported_.to(links.mutable_round_trips());
  membership::LinkRates rates;
  for (const auto& [member, rate] : rates_reported_) rates.keep_lower({member.incarnation.value, rate, config_.rank});
  rates.to(links.mutable_rates());
  std::string reported = links.SerializeAsString();
  if (links_ && links_reported_ == reported) return;
  links_reported_ = std::move(reported);
  reports_.push_back(std::move(report));
}

bool Driver::all_linked() const {
  if (links_) return std::ranges::all_of(*links_, [&](const auto& member) { return ring_->connected(member); });
  return std::ranges::all_of(peers(), [&](const auto& peer) {
    return peer.replica() == config_.replica.value || ring_->connected(member_of(peer));
  });
}

void Driver::measure(const ftar::Member& peer) {
  const auto round_trip = ring_->round_trip(peer);
  if (!round_trip) return;
  const auto length = length_of(*round_trip);
  const auto [known, fresh] = round_trips_.try_emplace(peer.incarnation.value, length);
  known->second = std::min(known->second, length);
}

// Connections get to know shorter ones with what they carry.
void Driver::measure_all() {
  for (const auto& member : ring_->peers()) measure(member);
  auto measured = round_trips();
  const bool others = measure_rates();
  if (measured == round_trips_reported_ && !others) return;
  round_trips_reported_ = std::move(measured);
  report_links();
}

// True: they have changed. A neighbour that nothing was written to stays as it was.
bool Driver::measure_rates() {
  const auto before = rates_reported_;
  std::erase_if(rates_reported_, [&](const auto& one) { return !ring_->needs(one.first); });
  for (const auto& [member, rate] : ring_->take_link_rates()) {
    const auto told = rates_reported_.find(member);
    rates_reported_[member] =
        coarse_rate(rate, told == rates_reported_.end() ? std::nullopt : std::optional(told->second));
  }
  return rates_reported_ != before;
}

// Also of connections that are closed since: with others it may be different, but those are not measured now.
membership::RoundTrips Driver::round_trips() const {
  membership::RoundTrips all;
  for (const auto& [incarnation, length] : round_trips_)
    if (membership::is_told(machine_.incarnation().value, incarnation, round_trips_.size()))
      all.put(incarnation, length);
  return all;
}

void Driver::on_prospect(const proto::Prospect& prospect) {
  const bool in_it = std::ranges::any_of(
      prospect.members(), [&](const auto& m) { return m.incarnation() == machine_.incarnation().value; });
  if (!ring_ || prospect.job() != job_ || machine_.member() || !in_it) return;
  prospect_ = prospect;
  choose_links();
  reach_peers();
  report_links();
}

// Of a job in which not all members are connected with each other.
void Driver::choose_links() {
  if (!link_rule_.full_mesh_members) return;
  links_.emplace();
  calls_.clear();
  if (machine_.member() && ring_->epoch() == machine_.epoch()) {
    for (const auto& member : ring_->links()) links_->insert(member);
    prospect_.Clear();
  } else if (!machine_.member()) {
    const auto wanted = membership::links_of_candidate(link_rule_, prospect_, machine_.incarnation().value);
    for (const auto& m : prospect_.members())
      if (wanted.contains(m.incarnation())) links_->insert(member_of(m));
    if (prospect_.candidates() > 0)
      for (int i = 0; i < prospect_.members_size() - static_cast<int>(prospect_.candidates()); ++i)
        calls_.insert(member_of(prospect_.members(i)));
    // What it has from earlier prospects is no use to anybody; a few are kept, for they may be wanted again.
    const auto known = ring_->peers();
    if (known.size() > 2 * links_->size())
      for (const auto& member : known)
        if (!links_->contains(member)) ring_->forget(member);
  }
  std::erase_if(unreached_, [&](const auto& one) {
    return !links_->contains({ReplicaId(one.second.replica()), one.first});
  });
}

// A trainer that computes is silent, too. What is normal is learned from the steps so far; a process that is stopped
// is found by its missing heartbeats long before.
Duration Driver::patience_with_compute() const {
  if (step_times_.size() < kStepsToLearnFrom) return std::max({silence_, config_.patience, config_.first_steps});
  return silence_ + 8 * *std::max_element(step_times_.begin(), step_times_.end());
}

void Driver::occupy(std::optional<Occupation> occupation, TimePoint now) {
  const bool told = !occupied_ || to_be_told(*occupied_, now);
  if (occupied_ && told && (!occupation || occupation->computes)) released_at_ = now;
  if (occupied_ && occupied_->computes) computed_before_ = std::min(computed_before_ + 1, kFirstComputed);
  computed_.busy += busy_otherwise(now);
  occupied_ = std::move(occupation);
  if (told) excused_at_ = {};  // what was reported last is not so any more
}

// What the trainer may take its time with. It may have begun, or ended, what it is busy with in the course of the
// pause, where this thread alone stood.
void Driver::forgive_trainer(Duration pause, TimePoint now) {
  if (occupied_) {
    const TimePoint since = occupied_->since;
    membership::forgive(occupied_->since, pause, now);
    occupied_->until += occupied_->since - since;
  }
  for (TimePoint* since : {&offered_at_, &begun_at_, &released_at_}) membership::forgive(*since, pause, now);
}

// A trainer that does something else, which its step waits for, is not late. Only its own library can tell the others
// so.
void Driver::excuse_trainer(TimePoint now) {
  if (!current_) return;
  const bool begun = taken_ == current_->step;
  const bool waited_for =
      current_->contributes ? std::ranges::any_of(wanted_, [](bool wanted) { return !wanted; }) : !begun;
  if (!waited_for) return;
  if (std::exchange(offered_, current_->step) != current_->step) offered_at_ = now;
  if (begun && std::exchange(begun_, taken_) != taken_) begun_at_ = now;
  if (now - excused_at_ < silence_ / 8) return;  // a coordinator that is new judges after a quarter
  if (occupied_ && to_be_told(*occupied_, now)) tell_occupation(now);
  else excuse_between_steps(now);
}

// Where it computes, before the others' patience is over. Who has come to a job that runs does not know how long that
// is until it has been in steps of which nobody was told; where all are new, they would never learn from those that
// are.
bool Driver::to_be_told(const Occupation& occupation, TimePoint now) const {
  if (!occupation.computes) return true;
  const bool learns = step_times_.size() < kStepsToLearnFrom && (came_late_ || computed_before_ < kFirstComputed);
  return now - occupation.since > (learns ? silence_ : patience_with_compute()) / 2;
}

void Driver::tell_occupation(TimePoint now) {
  const auto& [reason, since, until, computes] = *occupied_;
  const bool may = now <= until;
  excuse(fmt::format("its trainer, which has been busy with '{}' for {:.1f} s, {} {:.1f} s", reason,
                     seconds(now - since), may ? "of the" : "longer than the", seconds(until - since)) +
             (may ? " that it may be" : " that it had asked for"),
         may, since, now);
}

// It has begun this step late, or resumed it, or has not begun it. When it has begun in time, the others know as much
// as its library does.
void Driver::excuse_between_steps(TimePoint now) {
  const bool begun = taken_ == current_->step;
  const TimePoint from = std::max(begun ? begun_at_ : offered_at_, released_at_);
  if ((begun ? from : now) - offered_at_ < silence_ / 4) return;
  if (!current_->contributes && from != released_at_) return;
  if (now - from > (begun ? patience_with_compute() : config_.between_steps)) return;
  excuse(!begun                 ? "its trainer, which is between steps"
         : from == released_at_ ? "its trainer, which goes on with the step"
                                : "its trainer, which has begun the step late",
         true, now, now);
}

// The daemon hears it again when another trainer of its node, or of its relay's, has come.
void Driver::on_waits(const proto::Waits& waits) {
  auto what = without_times(waits.why());
  if (!waits.stands() && (current_ || what == waits_for_)) return;
  logger().warn("the job waits for {}", waits.why());
  waits_for_ = std::move(what);
}

void Driver::on_peers(const proto::Peers& fragment) {
  news_.MergeFrom(fragment);
  if (fragment.more()) return;
  const proto::Peers news = std::exchange(news_, {});
  std::map<ftar::Member, std::string> before;  // addresses
  std::set<ftar::Member> after;
  for (const auto& peer : peers()) before.emplace(member_of(peer), peer.address());
  (void)peers_.apply(news);
  if (!ring_) return;
  for (const auto& peer : peers()) after.insert(member_of(peer));
  for (const auto& [member, address] : before)
    if (!after.contains(member)) ring_->forget(member);  // fenced
  std::erase_if(unreached_, [&](const auto& one) {
    return !after.contains({ReplicaId(one.second.replica()), one.first});
  });
  for (const auto& peer : peers()) {
    const auto known = before.find(member_of(peer));
    if (known == before.end() || known->second == peer.address()) continue;
    unreached_.erase(known->first.incarnation);  // what it says is of the address of before
    ring_->on_address(known->first, {peer.address(), secret_});
  }
  const auto peers_now = peers_.incarnations(config_.rank);
  std::erase_if(round_trips_, [&](const auto& one) { return !peers_now.contains(one.first); });
  if (current_)
    if (auto now = cards(); current_->cards != now) {  // somebody's machine has another address
      current_->cards = std::move(now);
      ++revision_;
    }
  reach_peers();
  report_links();
}

// Connects with those of its links that there is no connection with: at first, and again where it broke. Inside an
// epoch a new connection is of use in the next one only, which the coordinator begins for it. A few at a time, the next
// older one first: so nobody is called by all of a large job at once. Who was called last comes last: it may be one
// that never answers. Whom this epoch needs is called before all others, and does not wait for those that are being
// called.
void Driver::reach_peers() {
  std::vector<const proto::Peer*> missing, needed;
  for (const auto& peer : peers())
    if (calls(peer) && peer.replica() != config_.replica.value && to_be_linked(member_of(peer)) &&
        !ring_->knows(member_of(peer)))
      (ring_->needs(member_of(peer)) ? needed : missing).push_back(&peer);
  const auto by_turns = [&](std::vector<const proto::Peer*>& all, std::uint64_t& below, std::size_t most) {
    std::ranges::sort(all, std::ranges::greater{}, [&](const proto::Peer* peer) {
      return std::pair(peer->incarnation() < below, peer->incarnation());
    });
    std::size_t calls = ring_->connecting();
    more_to_reach_ |= all.size() + calls > most;
    for (const auto* peer : all) {
      if (calls++ >= most) return;
      below = peer->incarnation();
      if (auto connecting = ring_->connect(member_of(*peer), {peer->address(), secret_}); !connecting)
        not_reached(member_of(*peer), connecting.error().message);
    }
  };
  more_to_reach_ = false;
  const std::size_t few = std::max<std::size_t>(1, config_.calls_at_once / 8);
  by_turns(needed, needed_below_, 2 * config_.calls_at_once);
  // A member's spares are for later: the step goes first.
  if (links_ && machine_.member() && !ring_->clean()) more_to_reach_ = true;
  else by_turns(missing, reach_below_, links_ && machine_.member() ? few : config_.calls_at_once);
}

}  // namespace rejoin
