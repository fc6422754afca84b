// Several coordinators and their store: whose decisions count, what may leave them, and what can go wrong between them
// and others.
#include <fmt/format.h>

#include <algorithm>

#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {

CoordinatorProcess* World::leader() const {
  if (!shared()) return coordinators_[0] && coordinators_[0]->of_the_job() ? coordinators_[0].get() : nullptr;
  for (const auto& one : coordinators_)
    if (one && one->decisions() != nullptr && one->instance == store_.leader().instance()) return one.get();
  return nullptr;
}

const membership::Coordinator* World::deciding() const {
  const CoordinatorProcess* one = leader();
  return one != nullptr ? one->decisions() : nullptr;
}

// As a rule the one that leads.
std::uint32_t World::draw_coordinator(Random& random) const {
  if (!shared()) return 0;
  const CoordinatorProcess* leads = leader();
  if (leads != nullptr && !random.one_in(4)) return leads->number;
  return static_cast<std::uint32_t>(random.pick(shape.coordinators));
}

void World::answer_coordinator(std::uint64_t instance, Duration delay, membership::StoreAnswer answer) {
  auto found = processes_.find(instance);
  if (found == processes_.end()) return;
  auto* to = dynamic_cast<CoordinatorProcess*>(found->second);
  deliver(*to, delay, [to, answer = std::move(answer)] { to->on_answer(answer); });
}

void World::on_shared_record(std::uint64_t position, const proto::LogRecord& record) {
  if (position < log_.size() && log_[position].SerializeAsString() == record.SerializeAsString())
    return;  // once more, where the store was set back
  if (position != log_.size())
    return checker().violate("one-decision",
                             fmt::format("another record is written as number {} of {}", position, log_.size()));
  on_record(record);
  if (record.has_caught_up()) on_replica_status();
  CoordinatorProcess* leads = leader();
  if (leads == nullptr) return;
  // What is written is written, whether or not its writer hears of it.
  if (std::exchange(crash_in_append_, false))
    after({}, [this, number = leads->number] { kill_coordinator(number, "a crash while it wrote"); });
  if (slow_append_ > Duration{}) {
    disturb(slow_append_);  // from now on, not from when the fault was drawn: nothing was appended until now
    store_.go_away(now() + std::exchange(slow_append_, {}));
  }
}

// While the same one leads. All have copies of more than it has then: otherwise one could go on from less, in another
// history (world_older_log.cc has those).
void World::set_back_store(Random& random, TimePoint until) {
  if (!shared() || whole_log_ || !store_.set_back(random, *std::ranges::min_element(copied_))) return;
  count("store set back");
  if (random.one_in(2)) store_.go_away(until);
}

// It is started again, in vain for as long as the leader has not noticed. Where nobody leads any more, the operator
// puts the data back.
bool World::may_give_up(std::uint32_t coordinator) {
  if (!store_.lacked_records()) return false;
  after({}, [this, coordinator] {
    if (!store_.lacks_records() || leader() != nullptr) return kill_coordinator(coordinator, "the store lacks records");
    put_back_data();
  });
  return true;
}

void World::put_back_data() {
  count("the store's data put back");
  kill_coordinators("the store's data is put back");
  store_.clear();
  store_.begin_with(log_);
}

// What a coordinator takes for the log is what has been written, in that order.
void World::on_copied(std::uint32_t coordinator, const proto::LogRecord& record) {
  const std::uint64_t position = copied_[coordinator]++;
  if (position >= log_.size() || log_[position].SerializeAsString() != record.SerializeAsString())
    checker().violate("one-decision", fmt::format("coordinator {} takes another record for number {} than was written",
                                                  coordinator, position));
}

std::string World::landmark_of_copy(std::uint32_t coordinator) const {
  const std::vector<proto::LogRecord> copy(log_.begin(),
                                           log_.begin() + static_cast<std::ptrdiff_t>(copied_[coordinator]));
  const auto landmark = membership::ReplicatedCoordinator::landmark_of(copy, job);
  REJOIN_CHECK(landmark.has_value(), "{}", landmark.error());
  return *landmark;
}

// What a plan says is written, and who does not lead any more decides, answers and closes nothing: not even one that
// was stopped, and goes on.
void World::check_output(const CoordinatorProcess& of, const membership::ReplicatedCoordinator::Actions& actions) {
  bool decides = !actions.close.empty();
  for (const auto& [nodes, message] : actions.send) {
    const auto& plan = message.plan();
    if (plan.epoch() > epoch_written_ || plan.committed() > step_written_)
      checker().violate("one-decision", fmt::format("a plan of epoch {} after step {} is sent before that is written",
                                                    plan.epoch(), plan.committed()));
    decides |= !message.has_leads() && !message.has_heartbeat() && !message.has_waits();
  }
  if (decides && !store_.has_led(of.instance) && now() - resumed_at_ > 2 * job.silence)
    checker().violate("one-decision", fmt::format("coordinator {} answers, and does not lead", of.number));
}

// A leader that more than half of the ranks have heard all the time is not to be deposed. A claim that was long on its
// way was made when it was right.
void World::on_claim(std::uint32_t coordinator, const proto::Leader& before, bool late) {
  count("lead claimed");
  note("coordinator {} takes the lead", coordinator);
  // It has more than the store, and less than was written: what it went on from would be another history.
  if (store_.lacks_records() && copied_[coordinator] < log_.size()) after({}, [this] { put_back_data(); });
  if (late || now() < old_news_until_ || now() - resumed_at_ < 2 * job.silence)
    return;  // who goes on has old news, and hears what is queued
  for (const auto& one : coordinators_) {
    if (!one || one->instance != before.instance() || one->stopped || one->decisions() == nullptr) continue;
    const auto& members = one->decisions()->members();
    std::size_t hear = 0;
    for (const auto& member : members)
      for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
        if (hears(machine_of(member.replica.value, rank), one->number, std::chrono::milliseconds(150))) ++hear;
    if (2 * hear > members.size() * shape.ranks)
      checker().violate("progress", fmt::format("coordinator {} deposes {}, whom more than half of the ranks hear",
                                                coordinator, one->number));
  }
}

// That one as the leader, for so long at least; if it is behind a relay, through that.
bool World::hears(std::uint32_t node, std::uint32_t coordinator, Duration since) {
  if (!daemons_[node]) return false;
  const auto relay = relay_of(node);
  if (!relay) return daemons_[node]->uplink().hears(coordinator, since);
  return relays_[*relay] && daemons_[node]->uplink().hears(shape.coordinators + *relay, since) &&
         relays_[*relay]->uplink().hears(coordinator, since);
}

std::optional<std::uint32_t> World::draw_relay(std::uint32_t node, Random& random) const {
  if (shape.relays == 0) return std::nullopt;
  const auto any = static_cast<std::uint32_t>(random.pick(shape.relays));
  return relay_of(node).value_or(any);
}

// One coordinator and some of the nodes, and of the relays.
void World::part(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const std::uint32_t coordinator = draw_coordinator(random);
  for (std::uint32_t node = 0; node < nodes(); ++node)
    if (random.one_in(2)) parted_[{node, coordinator}] = until;
  for (std::uint32_t relay = 0; relay < shape.relays; ++relay)
    if (random.one_in(2)) parted_[{caller_of_relay(relay), coordinator}] = until;
}

// All nodes and all coordinators, whose machine has lost its cable, or whose switch is away. Then one node after the
// other has a way again, all of them within less than a silence, or than what is left of one.
void World::cut_off_all(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const bool resets = random.one_in(2), restarts = random.one_in(2);
  const Duration apart = job.silence / (fault.lasting < job.silence ? 8 : 2);
  for (std::uint32_t from = 0; from < nodes() + shape.relays; ++from) {
    if (from < nodes() && relay_of(from)) continue;
    const TimePoint open = until + random.between({}, apart);
    up_blocked_[from] = std::max(up_blocked_[from], open);
    down_blocked_[from] = std::max(down_blocked_[from], open);
  }
  if (resets) {
    std::vector<std::uint64_t> cut;
    for (const auto& [number, link] : links_)
      if (link.station < shape.coordinators) cut.push_back(number);
    for (auto number : cut) reset_link(number);
  }
  if (restarts) after(random.between({}, fault.lasting), [this] { kill_coordinators("killed while it hears nobody"); });
  faults_end_ = std::max(faults_end_, until + job.silence);
}

// The invariant nobody-heard: that the coordinators have heard nobody for a while costs nobody its place, whoever comes
// back first.
void World::see_whom_to_spare(const Fault& fault) {
  const bool calm =
      now() > disturbed_until_ && rivals_.empty() && interruptions_.empty() && checkers_.size() == 1 && !bits_damaged_;
  if (fault.kind != FaultKind::cut_off_all || (!calm && spared_.empty())) return spared_.clear();
  if (!calm || deciding() == nullptr) return;
  spared_.clear();
  for (const auto& member : deciding()->members())
    for (const auto& trainer : trainers_[member.replica.value])
      if (!member.catching_up && trainer && trainer->incarnation() == member.incarnation)
        spared_.insert(trainer->instance);
}

}  // namespace rejoin::sim
