#include "sim/world.h"

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr Duration kFaultsFor = 3s;   // of virtual time
constexpr Duration kFar = 500us;      // a room, where that is to be measured
constexpr std::size_t kRecent = 400;  // lines kept where not all are
constexpr std::uint64_t kMaxEvents = 20'000'000;

Shape shape_of(const Options& options) {
  Shape shape = Shape::of(options.seed);
  if (options.replicas != 0) shape.replicas = options.replicas;
  if (options.ranks != 0) shape.ranks = options.ranks;
  if (options.coordinators != 0) shape.coordinators = options.coordinators;
  if (options.plant >= Plant::append_without_comparison) shape.coordinators = 3;
  if (options.balance) shape.balance = *options.balance;
  if (options.faults || options.run_for || options.plant != Plant::none) shape.steps = 0;
  if (options.steps) shape.steps = *options.steps;
  if (options.model != nullptr) shape.codings = Codings::off;  // its report is of uncoded gradients
  shape.nodes = std::min(shape.nodes, shape.ranks);
  return shape;
}

membership::JobConfig job_of(const Options& options, const Shape& shape) {
  return {.replicas = shape.replicas,
          .ranks = shape.ranks,
          .batch = options.batch,
          .constant_batch = shape.constant_batch,
          .balance = {.on = shape.balance},
          .steps = shape.steps,
          .id = options.seed + 1,
          .silence = 200ms,
          // A vote that is forged has no digests, and would not get past the audit.
          .audit = {.on = options.plant != Plant::no_audit && options.plant != Plant::commit_without_vote,
                    .period = 1 + Random(options.seed, "audit", 0).pick(12)},
          .links = shape.links};
}

transport::sim::Options fabric_of(const Options& options, const Shape& shape) {
  return {.seed = options.seed * 7 + 3,
          .min_delay = 1us,
          .max_delay = shape.slowest,
          .detection = shape.detection,
          .between_rooms = !shape.located   ? 0us
                           : shape.measured ? 2 * shape.slowest + kFar
                                            : 2 * shape.slowest,
          .late_writes = shape.late_writes,
          .lands_stopped = shape.lands_stopped,
          .viewable = shape.viewable,
          .unfenced = options.plant == Plant::stale_write};
}

}  // namespace

Outcome play(const Options& options) { return World(options).run(); }

World::World(const Options& options)
    : options_(options),
      shape(shape_of(options)),
      job(job_of(options, shape)),
      failures_random_(chance("failures of a long run")),
      plant_random_(chance("the planted bug")),
      fabric_(fabric_of(options, shape), clock_),
      of_others_(options_.ignore, model(), shape.ranks,
                 {.coded = false, .follows_times = false, .direct_bytes = 0, .factor = {}}),
      health_(shape.replicas),
      trainers_(shape.replicas),
      coordinators_(shape.coordinators),
      store_(*this),
      copied_(shape.coordinators),
      words_(shape.coordinators),
      allowed_to_roll_back_(shape.coordinators),
      words_random_(chance("words")),
      words_stay_(words_random_.one_in(3)),
      damage_at_rest_(shape.replicas),
      checkpoints_(shape.replicas),
      slow_links_(nodes() + shape.relays),
      up_blocked_(nodes() + shape.relays),
      down_blocked_(nodes() + shape.relays) {
  checkers_.push_back(new_checker());
  clock_.set(TimePoint(1s));
  decided_at_ = now();
  const auto values = shape.values();
  for (auto one = values.begin(); one != values.end(); ++one)
    for (auto other = values.begin(); other != one; ++other)
      count(fmt::format("pair: {} {}, {} {}", other->first, other->second, one->first, one->second));
  outcome_.faults = options.faults ? *options.faults
                    : options.run_for
                        ? std::vector<Fault>{}
                        : draw_faults(options.seed, shape.replicas, shape.ranks, kFaultsFor, options.often);
  for (auto& ranks : trainers_) ranks.resize(shape.ranks);
  daemons_.resize(nodes());
  relays_.resize(shape.relays);
  Random clocks = chance("clocks");
  for (std::uint32_t machine = 0; machine < nodes() + shape.coordinators + shape.relays; ++machine)
    clocks_.push_back(clocks.of_any_size(1us, 1000s));
  suspended_until_.resize(clocks_.size());
  off_until_.resize(clocks_.size());
  away_until_.resize(shape.replicas);
  for (std::uint32_t node = 0; node < nodes(); ++node) {
    control_random_.push_back(chance("control messages", node));
    supervisor_random_.push_back(chance("supervisor", node));
  }
  for (std::uint32_t i = 0; i < shape.coordinators; ++i)
    supervisor_random_.push_back(chance("supervisor", nodes() + i));
  for (std::uint32_t i = 0; i < shape.relays; ++i) {
    control_random_.push_back(chance("control messages", nodes() + i));
    supervisor_random_.push_back(chance("supervisor", nodes() + shape.coordinators + i));
  }
  if (shape.old) grow_old();
  speeds_ = options.speeds;
  Random speeds = chance("speeds");
  for (std::uint32_t replica = 0; shape.balance && options.speeds.empty() && replica < shape.replicas; ++replica)
    for (const Duration from : {0s, 1s, 2s})
      speeds_.push_back({from, replica, speeds.one_in(3) ? 1.0 + static_cast<double>(speeds.pick(4)) : 1.0});
}

Checker World::new_checker() {
  return {options_.ignore,
          model(),
          shape.ranks,
          {.coded = shape.coded(),
           .follows_times = shape.codings == Codings::automatic,
           .direct_bytes = direct_bytes(shape),
           .factor = [this](std::uint64_t step) { return shape.factor(step); }}};
}

const std::optional<Violation>& World::violation() const {
  for (const auto& checker : checkers_)
    if (checker.violation()) return checker.violation();
  return checkers_.front().violation();
}

Duration World::computing(const Trainer& trainer, std::uint64_t samples, Duration usual) const {
  const Duration slowness = this->slowness(trainer.replica, trainer.rank);
  if (speeds_.empty()) return usual + slowness;
  double times = 1;
  for (const auto& speed : speeds_)
    if (speed.replica == trainer.replica && speed.from <= now().time_since_epoch()) times = speed.times;
  const auto batch = static_cast<std::int64_t>(job.batch);
  const Duration of_step = options_.sample > Duration{} ? options_.sample * batch : usual;
  const double shares = static_cast<double>(samples) / static_cast<double>(batch);
  return std::chrono::duration_cast<Duration>(of_step * (shares * times)) + slowness;
}

// A log of a job that has been through much and has committed nothing. FTAR's tags have twelve bits of the epoch.
void World::grow_old() {
  auto& of_job = *log_.emplace_back().mutable_job();
  of_job.set_replicas(job.replicas);
  of_job.set_ranks(job.ranks);
  of_job.set_id(job.id);
  of_job.set_batch(job.batch);
  membership::put_rule(job.links, of_job);
  of_job.set_constant_batch(job.constant_batch);
  log_.emplace_back().mutable_incarnated()->set_incarnation((std::uint64_t{1} << 32) - 3);
  auto& begun = *log_.emplace_back().mutable_epoch();
  begun.set_epoch(4093);
  begun.set_step(1);
  begun.set_reason("all members are gone");
  disk_ = membership::log_bytes(log_, 0);
  epoch_written_ = begun.epoch();
  if (shared()) store_.begin_with(log_);
  for (const auto& record : log_) checker().on_record(record);
}

World::~World() {
  agenda_.clear();
  coordinators_.clear();
  rivals_.clear();
  for (auto& ranks : trainers_) ranks.clear();
  daemons_.clear();
  relays_.clear();
}

std::unique_ptr<transport::Engine> World::make_engine(std::uint32_t node, Rails& rails) {
  rails.clear();
  std::vector<std::unique_ptr<transport::Engine>> made;
  for (unsigned i = 0; i < shape.rails; ++i) {
    made.push_back(fabric_.make_engine());
    rails.push_back(made.back().get());
    fabric_.stand(*rails.back(), room_of(node));
    fabric_.belong(*rails.back(), node / shape.nodes);
    const SlowLink& link = slow_links_[node];
    fabric_.slow(*rails.back(), link.out, link.in, link.until);
  }
  if (made.size() == 1) return std::move(made.front());
  transport::striped::Options options{.largest_piece = 256,
                                      .smallest_piece = 64,
                                      .bytes_in_flight = 2048,
                                      .stall = 100ms,
                                      .first_retry = 10ms,
                                      .longest_retry = 100ms,
                                      .seed = options_.seed << 32 | next_number()};
  return transport::striped::make_engine(std::move(made), options, clock_).value();
}

// ---- time

void World::after(Duration delay, std::function<void()> action) {
  agenda_.emplace(std::pair(now() + delay, sequence_++), std::move(action));
}

void World::after_of(const Process& process, Duration delay, std::function<void()> action) {
  after(delay, [this, number = process.instance, action = std::move(action)] {
    if (processes_.contains(number)) action();
  });
}

bool World::take_damage_at_rest(std::uint32_t replica) {
  const bool due = damage_at_rest_[replica];
  damage_at_rest_[replica] = false;
  return due;
}

bool World::plant_due() { return now().time_since_epoch() > 1500ms && plant_random_.one_in(20); }

void World::add_note(std::string line) {
  line = fmt::format("{:12.6f}  {}", seconds(now().time_since_epoch()), line);
  outcome_.trace_hash = combine_digests(outcome_.trace_hash, digest(as_bytes(line)));
  if (options_.trace) {
    outcome_.trace.push_back(std::move(line));
    return;
  }
  recent_.push_back(std::move(line));
  if (recent_.size() > kRecent) recent_.pop_front();
}

void World::remark(const std::string& what) {
  outcome_.trace.push_back(fmt::format("{:12.6f}    {}", seconds(now().time_since_epoch()), what));
}

// ---- the run

// The next failure of a long run, where it is due. False at the end.
bool World::go_on_long() {
  if (!settled()) return true;
  if (failures_ == options_.run_for->failures)
    return outcome_.committed.empty() || outcome_.committed.back().samples < options_.run_for->samples;
  if (now() < next_failure_) return true;
  constexpr FaultKind kinds[] = {FaultKind::kill_trainer, FaultKind::hang_trainer, FaultKind::kill_replica,
                                 FaultKind::power_loss, FaultKind::kill_coordinator};
  Fault fault{
      .kind = kinds[failures_random_.pick(std::size(kinds))], .lasting = 300ms, .detail = failures_random_.next()};
  if (fault.kind == FaultKind::power_loss) fault.lasting = {};  // its supervisor starts it elsewhere
  fault.replica = static_cast<std::uint32_t>(failures_random_.pick(shape.replicas));
  fault.rank = static_cast<std::uint32_t>(failures_random_.pick(shape.ranks));
  happen(fault);
  ++failures_;
  next_failure_ =
      now() + fault.lasting + failures_random_.between(100ms, 300ms);  // what hangs is noticed only after a while
  faults_end_ = now();
  return true;
}

// How things stand, for whoever reads the trace of a failure.
void World::describe() {
  for (const auto& coordinator : coordinators_)
    if (auto* one = dynamic_cast<const ReplicatedCoordinator*>(coordinator.get())) note("{}", one->describe());
  if (deciding() == nullptr) return note("nobody decides");
  const auto& decisions = *deciding();
  for (const auto& [id, replica] : decisions.replicas())
    for (const auto& status : replica.statuses.current())
      note("the coordinator knows replica {} ranks {}: incarnation {}, {}connected with {}", id, status.ranks.text(),
           replica.incarnation, replica.caught_up.includes(status.ranks) ? "caught up, " : "", status.links.text());
  for (const auto& line : decisions.waiting_for(now_at(leader()->machine))) note("the step waits for {}", line);
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer) note("{}", trainer->describe());
  for (auto& rival : rivals_) note("a second process: {}", rival.trainer->describe());
}

void World::wake_who_has_events() {
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer && !trainer->woken && !trainer->engine->arm()) wake(*trainer);
  for (auto& rival : rivals_)
    if (!rival.trainer->woken && !rival.trainer->engine->arm()) wake(*rival.trainer);
  for (auto& daemon : daemons_)
    if (daemon && !daemon->woken && !daemon->engine->arm()) wake(*daemon);
}

Outcome World::run() {
  const TimePoint began = now();
  for (std::uint32_t i = 0; i < shape.coordinators; ++i) start_coordinator(i);
  for (std::uint32_t i = 0; i < shape.relays; ++i) start_relay(i);
  for (std::uint32_t node = 0; node < nodes(); ++node) start_daemon(node);
  for (std::uint32_t replica = 0; replica < shape.replicas; ++replica)
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) start_trainer(replica, rank);
  for (const auto& fault : outcome_.faults)
    after(fault.at, [this, fault] {
      if (fault.moment == Moment::at_once) happen(fault);
      else waiting_faults_.push_back(fault);
    });
  faults_end_ = began + kFaultsFor;
  let_operator_act();

  std::uint64_t target = 0;
  const std::uint64_t max_events = options_.run_for ? ~std::uint64_t{0} : kMaxEvents;
  while (!violation() && outcome_.events < max_events) {
    ++outcome_.events;
    const TimePoint next = agenda_.empty() ? TimePoint::max() : agenda_.begin()->first.first;
    if (fabric_.next_event() <= next) {
      fabric_.step();
    } else {
      auto event = agenda_.extract(agenda_.begin());
      clock_.set(std::max(now(), event.key().first));
      event.mapped()();
    }
    if (fabric_.stale_writes() > 0) checker().on_stale_write();
    wake_who_has_events();
    if (options_.run_for && !go_on_long()) break;
    if (has_ended()) break;
    if (now() < faults_end_) continue;
    crash_in_append_ = disk_full_ = false;
    slow_append_ = {};
    waiting_faults_.clear();
    if (finished()) check_the_end();
    else if (recovered_again(target)) break;
  }
  if (outcome_.events >= max_events) checker().violate("progress", "it goes round in circles");
  check_epochs();
  if (!violation()) {
    membership::Coordinator whole(job);  // a leader may know of more than is written
    if (auto read = whole.recover(log_, now()); !read) checker().violate("no-garbage", read.error().message);
    checker().on_end(log_, shared() ? whole.ledger() : deciding()->ledger());
  }
  if (violation()) describe();
  if (violation()) note("VIOLATION {}: {}", violation()->invariant, violation()->what);
  count("bytes between rooms", fabric_.bytes_between_rooms());
  outcome_.violation = violation();
  outcome_.virtual_seconds = seconds(now() - began);
  if (!options_.trace) outcome_.trace.assign(recent_.begin(), recent_.end());
  return std::move(outcome_);
}

}  // namespace rejoin::sim
