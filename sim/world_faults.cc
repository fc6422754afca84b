// What each fault does to the simulated cluster.
#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

Duration World::slowness(std::uint32_t replica, std::uint32_t rank) const {
  auto found = slow_until_.find({replica, rank});
  return found != slow_until_.end() && found->second > now() ? Duration(250ms) : Duration{};
}

void World::disturb(Duration lasting, Duration felt) {
  felt_until_ = std::max(felt_until_, now() + felt);
  disturbed_until_ = std::max(disturbed_until_, now() + lasting + 4 * job.silence);
}

void World::felt_for(Duration lasting) {
  disturb(lasting);
  faults_end_ = std::max(faults_end_, now() + lasting);
}

// Whose log is lost or another one does not end when it was to.
bool World::is_of_logs(FaultKind kind) {
  return kind == FaultKind::lose_log || kind == FaultKind::older_log || kind == FaultKind::other_job;
}

void World::happen(const Fault& fault) {
  // Where one replica is wrong, those who are right are needed.
  if (!is_of_bits(fault.kind) && somebody_is_wrong()) return;
  if (job.steps != 0 && is_of_logs(fault.kind)) return;
  count(fmt::format("fault: {}", to_string(fault.kind)));
  note("FAULT {} (replica {} rank {}, {:.1f} ms)", to_string(fault.kind), fault.replica, fault.rank,
       milliseconds(fault.lasting));
  see_whom_to_spare(fault);
  see_who_is_cut(fault);
  see_whom_it_harms(fault);
  if (is_of_bits(fault.kind)) return damage_bits(fault);
  disturb(fault.lasting, fault.kind == FaultKind::stay_away ? Duration{} : fault.lasting);
  Trainer* trainer = trainers_[fault.replica][fault.rank].get();
  const std::uint32_t node = node_of(fault.replica, fault.rank);
  Daemon* daemon = daemons_[node].get();
  const TimePoint until = now() + fault.lasting;
  faults_end_ = std::max(faults_end_, until);
  if (const auto kind = fault.kind; kind == FaultKind::partition || kind == FaultKind::one_way_partition ||
                                    kind == FaultKind::cut_off_from_some || kind == FaultKind::slow_link ||
                                    kind == FaultKind::forget_control || kind == FaultKind::cut_off_all)
    old_news_until_ = std::max(old_news_until_, until + 2 * job.silence), let_rivals_stay();
  Random random(fault.detail);
  switch (fault.kind) {
    case FaultKind::drift:
    case FaultKind::flip_state:
    case FaultKind::flip_reduced: return;
    case FaultKind::kill_trainer: return kill_trainer(fault.replica, fault.rank, "killed");
    case FaultKind::hang_trainer:
      if (trainer != nullptr) stop(*trainer, fault.lasting);
      return;
    case FaultKind::slow_trainer: slow_until_[{fault.replica, fault.rank}] = until; return;
    case FaultKind::kill_all:
      kill_rivals("killed with all others");
      for (std::uint32_t r = 0; r < shape.replicas; ++r)
        for (std::uint32_t i = 0; i < shape.ranks; ++i) kill_trainer(r, i, "killed with all others");
      return;
    case FaultKind::power_loss:
      off_until_[node] = std::max(off_until_[node], until);
      kill_daemon(node);
      for (Trainer* one : trainers_on(node)) end_trainer(*one, "killed with its node");
      return;
    case FaultKind::kill_replica:
      for (std::uint32_t i = 0; i < shape.ranks; ++i) kill_trainer(fault.replica, i, "killed with its replica");
      return;
    case FaultKind::stay_away:
      away_until_[fault.replica] = std::max(away_until_[fault.replica], until);
      return end_replica(fault);
    case FaultKind::kill_some:
      for (std::uint32_t r = 0; r < shape.replicas; ++r)
        for (std::uint32_t i = 0; i < shape.ranks && (r == fault.replica || fault.detail >> r % 64 & 1); ++i)
          if (r != fault.detail % shape.replicas) kill_trainer(r, i, "killed with others");
      return;
    case FaultKind::lying_joiner:
      if (daemon != nullptr) daemon->lie(until);
      return;
    case FaultKind::kill_daemon: return kill_daemon(node);
    case FaultKind::lose_log:
      if (!whole_log_) lose_log();
      return;
    case FaultKind::kill_coordinator: return kill_coordinator(draw_coordinator(random), "killed");
    case FaultKind::crash_in_append: crash_in_append_ = leader() != nullptr; return;
    case FaultKind::disk_full: disk_full_ = true; return;
    case FaultKind::partition:
    case FaultKind::one_way_partition: {
      const std::uint32_t cut = draw_caller(node, random);
      if (fault.kind == FaultKind::partition) down_blocked_[cut] = std::max(down_blocked_[cut], until);
      up_blocked_[cut] = std::max(up_blocked_[cut], until);
      return;
    }
    case FaultKind::cut_ring:
      if (trainer != nullptr)
        for (const auto* rail : trainer->rails) fabric_.cut(*rail);
      return;
    case FaultKind::cut_stream:
      if (daemon != nullptr)
        for (const auto* rail : daemon->rails) fabric_.cut(*rail);
      return;
    case FaultKind::lose_rail:
      if (trainer != nullptr) fabric_.cut(*trainer->rails[random.pick(trainer->rails.size())]);
      if (daemon != nullptr) fabric_.cut(*daemon->rails[random.pick(daemon->rails.size())]);
      return;
    case FaultKind::slow_link: return slow_link(fault, until);
    case FaultKind::damage:
      if (daemon != nullptr) fabric_.damage_next_write(*daemon->rails[random.pick(daemon->rails.size())]);
      return;
    case FaultKind::damage_at_rest: damage_at_rest_[fault.replica] = true; return;
    case FaultKind::pause:
      clock_.advance(fault.lasting);
      resumed_at_ = now();
      faults_end_ += fault.lasting;
      return;
    case FaultKind::stop_daemon:
      if (daemon != nullptr) stop(*daemon, fault.lasting);
      return;
    case FaultKind::stop_stream:
      if (daemon != nullptr) daemon->stop_stream(until);
      return;
    case FaultKind::stop_coordinator:
      if (auto& one = coordinators_[draw_coordinator(random)]) stop(*one, fault.lasting);
      return;
    case FaultKind::store_away: return store_.go_away(until);
    case FaultKind::store_cut_off: return store_.cut_off(draw_coordinator(random), until);
    case FaultKind::store_read_only: {
      std::optional<std::uint32_t> only;
      if (random.one_in(2)) only = draw_coordinator(random);
      return store_.take_nothing(until, only);
    }
    case FaultKind::store_set_back: return set_back_store(random, until);
    case FaultKind::cut_off_from_some: return part(fault, until);
    case FaultKind::cut_off_all: return cut_off_all(fault, until);
    case FaultKind::stop_some:
    case FaultKind::stop_all: return stop_many(fault);
    case FaultKind::suspend_node: return suspend_node(fault);
    case FaultKind::slow_disk: slow_append_ = fault.lasting; return;
    case FaultKind::hang_compute: return hang_compute(fault, until);
    case FaultKind::busy_trainer:
      if (trainer != nullptr) trainer->be_busy(fault.lasting, fault.detail % 4 == 3, fault.detail % 8 >= 4);
      return;
    case FaultKind::slow_digest:
      if (trainer != nullptr) trainer->slow_digest(fault.lasting, until);
      return;
    case FaultKind::reset_control:
      if (const auto of = caller(draw_caller(node, random)); of.process != nullptr)
        reset_link(of.uplink->any_link(random));
      return;
    case FaultKind::reset_ring:
      if (trainer != nullptr) fabric_.reset(*trainer->rails[random.pick(trainer->rails.size())], random.next());
      return;
    case FaultKind::reset_stream:
      if (daemon != nullptr) fabric_.reset(*daemon->rails[random.pick(daemon->rails.size())], random.next());
      return;
    case FaultKind::forget_control:
      if (const auto of = caller(draw_caller(node, random)); of.process != nullptr)
        forget_link(of.uplink->any_link(random), random.one_in(2) ? TimePoint::max() : until);
      return;
    case FaultKind::second_process: return second_process(fault, until);
    case FaultKind::other_job: return begin_other_job(fault, until);
    case FaultKind::older_log: return begin_older_log(fault);
    case FaultKind::kill_relay:
      if (const auto relay = draw_relay(node, random)) kill_relay(*relay, fault.lasting);
      return;
    case FaultKind::stop_relay:
      if (const auto relay = draw_relay(node, random); relay && relays_[*relay]) stop(*relays_[*relay], fault.lasting);
      return;
    case FaultKind::cut_replica: return cut_replica(fault, until);
    case FaultKind::stop_introduction: return stop_introduction(fault);
    case FaultKind::black_hole: return black_hole(fault, until);
    case FaultKind::forget: return forget(fault);
    case FaultKind::refuse_memory: {
      const std::uint64_t times = 1 + random.pick(4);
      if (random.one_in(2)) memory_[{fault.replica, fault.rank}].refused = times;
      else if (daemon != nullptr) fabric_.refuse_memory(*daemon->rails[0], times);
      return;
    }
    case FaultKind::slow_memory:
      memory_[{fault.replica, fault.rank}].takes = fault.lasting;
      return kill_trainer(fault.replica, fault.rank, "killed");
  }
}

// As where the disk under the log has failed: an operator ends everything that knows of the job, and starts it again.
void World::lose_log() {
  kill_rivals("the log is lost, and all start again");
  for (std::uint32_t r = 0; r < shape.replicas; ++r)
    for (std::uint32_t i = 0; i < shape.ranks; ++i) kill_trainer(r, i, "the log is lost, and all start again");
  for (std::uint32_t node = 0; node < nodes(); ++node) kill_daemon(node);
  kill_coordinators("its log is lost");
  log_.clear();
  disk_.clear();
  store_.clear();
  std::fill(copied_.begin(), copied_.end(), 0);
  epoch_written_ = step_written_ = 0;
  ++logs_lost_;
  std::fill(words_.begin(), words_.end(), Word{});
  last_roll_back_.reset();
  gone_on_since_ = false;
  steps_ever_ = 0;
  owners_.clear();
  survivors_.begin_with(0);
  checker().on_log_lost();
}

std::vector<Process*> World::processes() const {
  std::vector<Process*> all;
  for (const auto& [instance, process] : processes_) all.push_back(process);
  return all;
}

void World::on_moment(Moment moment, std::uint32_t replica) {
  for (auto at = waiting_faults_.begin(); at != waiting_faults_.end();) {
    if (at->moment != moment) {
      ++at;
      continue;
    }
    Fault fault = *at;
    at = waiting_faults_.erase(at);
    Random random(fault.detail + 1);
    const bool anyone = moment == Moment::commit || moment == Moment::epoch;
    if (!anyone && random.one_in(2)) fault.replica = replica;
    after(random.one_in(2) ? Duration{} : random.of_any_size(1us, 2ms), [this, fault] { happen(fault); });
  }
}

void World::hang_compute(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const std::uint32_t other =
      random.one_in(4) ? static_cast<std::uint32_t>(random.pick(shape.replicas)) : fault.replica;
  for (const auto replica : {fault.replica, other})
    if (Trainer* trainer = trainers_[replica][fault.rank].get()) trainer->hang_compute(until);
}

// From one replica's ranks and nodes to another's.
void World::black_hole(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const auto to = static_cast<std::uint32_t>(random.pick(shape.replicas));
  const auto block = [&](const Process* sender, const Process* receiver) {
    if (sender == nullptr || receiver == nullptr) return;
    for (const auto* from : sender->rails)
      for (const auto* rail : receiver->rails) fabric_.block(*from, *rail, until);
  };
  if (to == fault.replica) return;
  const bool streams = random.one_in(3);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    if (streams) block(daemons_[node_of(fault.replica, rank)].get(), daemons_[node_of(to, rank)].get());
    else block(trainers_[fault.replica][rank].get(), trainers_[to][rank].get());
}

// The next one, which may be soon: its connection is reset, or it is started again.
void World::stop_introduction(const Fault& fault) {
  Random random(fault.detail);
  const std::uint32_t of = draw_caller(node_of(fault.replica, fault.rank), random);
  interruptions_[of] = {1 + random.pick(3 + 2 * shape.ranks), fault.lasting};
  const Calling its = caller(of);
  if (its.process == nullptr) return;
  const auto how = random.pick(3);
  if (how == 0) reset_link(its.uplink->any_link(random));
  if (how != 1) return;
  if (of < nodes()) kill_daemon(of);
  else kill_relay(of - nodes(), random.between(1ms, 100ms));
}

// On all rails, or on one.
void World::forget(const Fault& fault) {
  Random random(fault.detail);
  const Process* of = trainers_[fault.replica][fault.rank].get();
  if (random.one_in(3)) of = daemons_[node_of(fault.replica, fault.rank)].get();
  if (of == nullptr) return;
  const bool one = random.one_in(4);
  const auto which = random.pick(of->rails.size());
  const Duration found = deadlines::kUnacknowledged.of(job.silence);
  for (std::size_t rail = 0; rail < of->rails.size(); ++rail)
    if (!one || rail == which) fabric_.forget(*of->rails[rail], found);
  faults_end_ = std::max(faults_end_, now() + found);
}

// They stop at once, and go on in an order that is drawn.
void World::stop_many(const Fault& fault) {
  Random random(fault.detail);
  for (Process* process : processes())
    if (fault.kind == FaultKind::stop_all || random.one_in(2))
      stop(*process, fault.lasting + random.of_any_size(1us, 10ms));
}

// A machine with all that runs on it. Its clock goes on, or stands as CLOCK_MONOTONIC does in a suspended laptop, or it
// is set forward as in a machine that was moved.
void World::suspend_node(const Fault& fault) {
  Random random(fault.detail);
  const std::uint32_t machine =
      random.one_in(4) ? nodes() + draw_coordinator(random) : node_of(fault.replica, fault.rank);
  if (suspended_until_[machine] > now()) return;
  suspended_until_[machine] = now() + fault.lasting;
  const Duration jump = random.of_any_size(1us, 10s);
  const std::uint64_t clock = random.pick(3);
  if (clock == 1) after(fault.lasting, [this, machine, stood = fault.lasting] { clocks_[machine] -= stood; });
  if (clock == 2) after(fault.lasting, [this, machine, jump] { clocks_[machine] += jump; });
  for (Process* process : processes())
    if (process->machine == machine) stop(*process, fault.lasting + random.of_any_size(1us, 1ms));
}

void World::slow_link(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const Duration extra = random.between(500us, 60ms);
  const std::uint64_t ways = random.pick(3);  // out, in, or both: most links that are slow are so one way
  const Duration out = ways != 1 ? extra : Duration{}, in = ways != 0 ? extra : Duration{};
  const std::uint32_t node = node_of(fault.replica, fault.rank);
  slow_links_[node] = {out, in, until};
  const auto slow = [&](const Rails& rails) {
    for (const auto* rail : rails) fabric_.slow(*rail, out, in, until);
  };
  if (daemons_[node]) slow(daemons_[node]->rails);
  for (const Trainer* one : trainers_on(node)) slow(one->rails);
}

}  // namespace rejoin::sim
