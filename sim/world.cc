#include "sim/world.h"

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr Duration kFaultsFor = 3s;   // of virtual time
constexpr std::size_t kRecent = 400;  // lines kept where not all are
constexpr std::uint64_t kMaxEvents = 20'000'000;

Shape shape_of(const Options& options) {
  Shape shape = Shape::of(options.seed);
  if (options.replicas != 0) shape.replicas = options.replicas;
  if (options.ranks != 0) shape.ranks = options.ranks;
  shape.nodes = std::min(shape.nodes, shape.ranks);
  return shape;
}

membership::JobConfig job_of(const Options& options, const Shape& shape) {
  return {.replicas = shape.replicas,
          .ranks = shape.ranks,
          .batch = options.batch,
          .steps = 0,
          .id = options.seed + 1,
          .silence = 200ms,
          // A vote that is forged has no digests, and would not get past the audit.
          .audit = {.on = options.plant != Plant::no_audit && options.plant != Plant::commit_without_vote,
                    .period = 1 + Random(options.seed, "audit", 0).pick(12)}};
}

transport::sim::Options fabric_of(const Options& options, const Shape& shape) {
  return {.seed = options.seed * 7 + 3,
          .min_delay = 1us,
          .max_delay = shape.slowest,
          .detection = shape.detection,
          .late_writes = shape.late_writes,
          .lands_stopped = shape.lands_stopped,
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
      checker_(options.ignore, model(), shape.ranks),
      trainers_(shape.replicas),
      damage_at_rest_(shape.replicas),
      checkpoints_(shape.replicas),
      slow_links_(nodes()),
      up_blocked_(nodes()),
      down_blocked_(nodes()) {
  clock_.set(TimePoint(1s));
  decided_at_ = now();
  const auto values = shape.values();
  for (auto one = values.begin(); one != values.end(); ++one)
    for (auto other = values.begin(); other != one; ++other)
      count(fmt::format("pair: {} {}, {} {}", other->first, other->second, one->first, one->second));
  outcome_.faults = options.faults    ? *options.faults
                    : options.run_for ? std::vector<Fault>{}
                                      : draw_faults(options.seed, shape.replicas, shape.ranks, kFaultsFor);
  for (auto& ranks : trainers_) ranks.resize(shape.ranks);
  daemons_.resize(nodes());
  Random clocks = chance("clocks");
  for (std::uint32_t machine = 0; machine <= nodes(); ++machine) clocks_.push_back(clocks.of_any_size(1us, 1000s));
  suspended_until_.resize(clocks_.size());
  off_until_.resize(clocks_.size());
  for (std::uint32_t node = 0; node < nodes(); ++node) {
    control_random_.push_back(chance("control messages", node));
    supervisor_random_.push_back(chance("supervisor", node));
  }
  supervisor_random_.push_back(chance("supervisor", nodes()));
  if (shape.old) grow_old();
}

// A log of a job that has been through much and has committed nothing. FTAR's tags have twelve bits of the epoch.
void World::grow_old() {
  auto& of_job = *log_.emplace_back().mutable_job();
  of_job.set_replicas(job.replicas);
  of_job.set_ranks(job.ranks);
  of_job.set_batch(job.batch);
  log_.emplace_back().mutable_incarnated()->set_incarnation((std::uint64_t{1} << 32) - 3);
  auto& begun = *log_.emplace_back().mutable_epoch();
  begun.set_epoch(4093);
  begun.set_step(1);
  begun.set_reason("all members are gone");
  disk_ = membership::log_bytes(log_, 0);
  for (const auto& record : log_) checker_.on_record(record);
}

World::~World() {
  agenda_.clear();
  coordinator_.reset();
  for (auto& ranks : trainers_) ranks.clear();
  daemons_.clear();
}

std::unique_ptr<transport::Engine> World::make_engine(std::uint32_t node, Rails& rails) {
  rails.clear();
  std::vector<std::unique_ptr<transport::Engine>> made;
  for (unsigned i = 0; i < shape.rails; ++i) {
    made.push_back(fabric_.make_engine());
    rails.push_back(made.back().get());
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

void World::say(std::string line) {
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

// ---- the coordinator

// The operator reads the status now and then. Where the job waits to be told that it may go back, and does so for a
// while, they start the coordinator with that.
void World::let_operator_act() {
  const auto wanted = coordinator_ ? coordinator_->decisions().wants_roll_back() : std::nullopt;
  if (!wanted) {
    roll_back_wanted_since_ = {};
  } else if (roll_back_wanted_since_ == TimePoint{}) {
    roll_back_wanted_since_ = now();
  } else if (now() - roll_back_wanted_since_ > job.silence) {
    count("operator: roll back");
    roll_back_to_ = *wanted;
    kill_coordinator(fmt::format("its operator lets the job go back to step {}", *wanted));
  }
  if (coordinator_ && coordinator_->decisions().stopped()) drop_who_is_wrong();
  after(job.silence / 4, [this] { let_operator_act(); });
}

membership::JobConfig World::job_to_start() {
  membership::JobConfig config = job;
  config.roll_back_to = allowed_to_roll_back_ = std::exchange(roll_back_to_, std::nullopt);
  config.drop = std::exchange(drop_, std::nullopt);
  return config;
}

World::Append World::append(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return Append::done;
  if (std::exchange(disk_full_, false)) {
    kill_coordinator("its disk is full");
    return Append::failed;
  }
  const bool crash = crash_in_append_;
  if (disk_.empty()) disk_ = membership::log_bytes({}, 0);  // on the disk since the log was opened
  const std::size_t synced = disk_.size();
  Bytes written = membership::log_bytes(records, synced);
  if (crash) written.resize(supervisor_random_[nodes()].pick(written.size() + 1));
  disk_.insert(disk_.end(), written.begin(), written.end());
  if (crash) lose_sectors(synced);
  std::size_t whole = records.size();
  if (crash) {
    const auto read = membership::parse_log(disk_, "the log");
    REJOIN_CHECK(read.has_value(), "{}", read.error());
    whole = read->records.size() - log_.size();
  }
  for (std::size_t i = 0; i < whole; ++i) on_record(records[i]);
  if (crash) {
    kill_coordinator("a crash while it wrote");
    return Append::failed;
  }
  if (slow_append_ > Duration{}) stop(*coordinator_, std::exchange(slow_append_, {}));
  return Append::done;
}

// Power was lost, sometimes, with the crash: of what was not synced any sectors are on the disk, and any not.
void World::lose_sectors(std::size_t synced) {
  constexpr std::size_t sector = 512;
  Random& random = supervisor_random_[nodes()];
  if (!random.one_in(2)) return;
  for (std::size_t begin = synced; begin < disk_.size();) {
    const std::size_t end = std::min(disk_.size(), (begin / sector + 1) * sector);
    if (random.one_in(2))
      std::fill(disk_.begin() + static_cast<std::ptrdiff_t>(begin), disk_.begin() + static_cast<std::ptrdiff_t>(end),
                std::byte{});
    begin = end;
  }
}

void World::on_record(const proto::LogRecord& record) {
  if (record.has_epoch() || record.has_committed()) on_decision();
  if (record.has_epoch()) {
    count("epoch begun");
    std::string members;
    for (const auto& m : record.epoch().members())
      members += fmt::format(" {}{}", m.replica(), m.catching_up() ? "c" : "");
    note("epoch {} from step {}:{} ({})", record.epoch().epoch(), record.epoch().step(), members,
         record.epoch().reason());
    if (!bits_damaged_ && options_.plant == Plant::none &&
        record.epoch().reason().find(" differ ") != std::string::npos)
      checker_.violate("no-drift", fmt::format("a false alarm: {}", record.epoch().reason()));
    on_moment(Moment::epoch, 0);
  }
  if (record.has_committed()) {
    count("step committed");
    note("step {} is committed in epoch {}", record.committed().step(), record.committed().epoch());
    on_committed(record.committed());
    on_moment(Moment::commit, 0);
  }
  if (record.has_rolled_back()) {
    count("rolled back");
    const Step to(record.rolled_back().version());
    note("rolled back to {}", to);
    if (to.value < record.rolled_back().from() && (!allowed_to_roll_back_ || to < *allowed_to_roll_back_))
      checker_.violate("state-survives", fmt::format("the job goes back to step {} without an operator's word", to));
    std::erase_if(outcome_.committed, [&](const auto& committed) { return committed.step > to.value; });
    // Later ones are of what was given up. The operator removes them.
    for (auto& of_replica : checkpoints_) of_replica.erase(of_replica.upper_bound(to.value), of_replica.end());
  }
  log_.push_back(record);
  checker_.on_record(record);
  survivors_.on_record(record, holders_of(record));
  check_survivors();
}

// A replica all of whose processes live and hold it.
void World::add_holder(Survivors::Holders& holders, std::uint32_t replica,
                       const std::function<bool(const Trainer&)>& holds) const {
  std::vector<std::uint64_t> processes;
  for (const auto& trainer : trainers_[replica])
    if (trainer && !trainer->ended && holds(*trainer)) processes.push_back(trainer->instance);
  if (processes.size() == shape.ranks) holders[replica] = std::move(processes);
}

Survivors::Holders World::holders_of(const proto::LogRecord& record) const {
  Survivors::Holders holders;
  for (const auto& member : record.committed().members())
    add_holder(holders, member.replica(),
               [&](const Trainer& trainer) { return trainer.exchanged(record.committed().step()); });
  for (const auto& member : record.epoch().members())
    if (!member.catching_up())
      add_holder(holders, member.replica(),
                 [&](const Trainer& trainer) { return trainer.incarnation().value == member.incarnation(); });
  return holders;
}

void World::on_standing() {
  Survivors::Holders holders;
  const auto& decisions = coordinator_->decisions();
  for (const auto& member : decisions.members())
    if (member.catching_up && decisions.caught_up(member))
      add_holder(holders, member.replica.value,
                 [&](const Trainer& trainer) { return trainer.incarnation() == member.incarnation; });
  survivors_.add(std::move(holders));
}

void World::check_survivors() {
  if (auto what = survivors_.take_violation()) checker_.violate("state-survives", *what);
}

// ---- the run

void World::on_committed(const proto::LogRecord::Committed& record) {
  Outcome::Committed committed{.at = seconds(now().time_since_epoch()), .step = record.step()};
  if (!outcome_.committed.empty()) committed.samples = outcome_.committed.back().samples;
  double sum = 0, count = 0;
  for (const auto& member : record.members()) {
    committed.samples += membership::samples_of(membership::batch_of(member));
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
      if (auto found = losses_[record.step()].find({member.replica(), rank}); found != losses_[record.step()].end())
        sum += found->second, ++count;
  }
  committed.loss = count > 0 ? sum / count : 0;
  losses_.erase(losses_.begin(), losses_.upper_bound(record.step()));
  outcome_.committed.push_back(committed);
}

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
  const auto& decisions = coordinator_->decisions();
  for (const auto& [id, replica] : decisions.replicas())
    for (const auto& standing : replica.standings)
      note("the coordinator knows replica {} ranks {}: incarnation {}, {}connected with {}", id, standing.ranks.text(),
           replica.incarnation, replica.caught_up.includes(standing.ranks) ? "caught up, " : "",
           fmt::join(standing.links, " "));
  for (const auto& line : decisions.waiting_for(now_at(coordinator_->machine))) note("the step waits for {}", line);
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer) note("{}", trainer->describe());
}

void World::wake_who_has_events() {
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer && !trainer->woken && !trainer->engine->arm()) wake(*trainer);
  for (auto& daemon : daemons_)
    if (daemon && !daemon->woken && !daemon->engine->arm()) wake(*daemon);
}

Outcome World::run() {
  const TimePoint began = now();
  start_coordinator();
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
  while (!checker_.violation() && outcome_.events < max_events) {
    ++outcome_.events;
    const TimePoint next = agenda_.empty() ? TimePoint::max() : agenda_.begin()->first.first;
    if (fabric_.next_event() <= next) {
      fabric_.step();
    } else {
      auto event = agenda_.extract(agenda_.begin());
      clock_.set(std::max(now(), event.key().first));
      event.mapped()();
    }
    if (fabric_.stale_writes() > 0) checker_.on_stale_write();
    wake_who_has_events();
    if (options_.run_for && !go_on_long()) break;
    if (now() < faults_end_) continue;
    crash_in_append_ = disk_full_ = false;
    slow_append_ = {};
    waiting_faults_.clear();
    if (whole_again(target)) break;
  }
  if (outcome_.events >= max_events) checker_.violate("progress", "it goes round in circles");
  check_epochs();
  if (!checker_.violation()) checker_.on_end(log_, coordinator_->decisions().ledger());
  if (checker_.violation() && coordinator_) describe();
  if (checker_.violation()) note("VIOLATION {}: {}", checker_.violation()->invariant, checker_.violation()->what);
  outcome_.violation = checker_.violation();
  outcome_.virtual_seconds = seconds(now() - began);
  if (!options_.trace) outcome_.trace.assign(recent_.begin(), recent_.end());
  return std::move(outcome_);
}

}  // namespace rejoin::sim
