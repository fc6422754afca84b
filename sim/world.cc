#include "sim/world.h"

#include <algorithm>

#include "base/digest.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr Duration kFaultsFor = 3s;  // of virtual time; then the cluster has until kSettled
constexpr Duration kSettled = 20s;   // … to be whole again and to have committed some steps
constexpr std::uint64_t kStepsAfter = 5;
constexpr std::size_t kRecent = 400;  // lines kept where not all are
constexpr std::uint64_t kMaxEvents = 20'000'000;

membership::JobConfig job_of(const Options& options) {
  return {.replicas = options.replicas, .ranks = options.ranks, .batch = options.batch, .steps = 0, .silence = 200ms};
}

transport::sim::Options fabric_of(const Options& options) {
  // Fast and slow networks; with writes that leave when posted, and that land although their poster has failed.
  const Duration slowest[] = {20us, 50us, 200us, 2ms};
  return {.seed = options.seed * 7 + 3,
          .min_delay = 1us,
          .max_delay = slowest[options.seed % 4],
          .detection = options.seed % 3 == 0 ? Duration(20ms) : Duration(1ms),
          .late_writes = options.seed % 2 == 0,
          .unfenced = options.plant == Plant::stale_write};
}

}  // namespace

Outcome play(const Options& options) { return World(options).run(); }

World::World(const Options& options)
    : options_(options),
      job(job_of(options)),
      random_(options.seed),
      fabric_(fabric_of(options), clock_),
      trainers_(options.replicas),
      damage_at_rest_(options.replicas),
      slow_links_(options.replicas),
      up_blocked_(options.replicas),
      down_blocked_(options.replicas) {
  clock_.set(TimePoint(1s));
  outcome_.faults = options.faults    ? *options.faults
                    : options.run_for ? std::vector<Fault>{}
                                      : draw_faults(options.seed, options.replicas, options.ranks, kFaultsFor);
  for (auto& ranks : trainers_) ranks.resize(options.ranks);
  daemons_.resize(options.replicas);
}

World::~World() {
  agenda_.clear();
  for (auto& ranks : trainers_) ranks.clear();
  daemons_.clear();
}

std::unique_ptr<transport::Engine> World::make_engine(std::uint32_t node, Rails& rails) {
  rails.clear();
  std::vector<std::unique_ptr<transport::Engine>> made;
  for (int i = 0; i < (options_.seed % 3 == 2 ? 2 : 1); ++i) {
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

void World::wake(Process& process) {
  if (process.stopped || std::exchange(process.woken, true)) return;
  after_of(process, between(1us, 20us), [this, number = process.instance] {
    Process& woken = *processes_.at(number);
    woken.woken = false;
    if (!woken.stopped) woken.run();
  });
}

bool World::take_damage_at_rest(std::uint32_t replica) {
  const bool due = damage_at_rest_[replica];
  damage_at_rest_[replica] = false;
  return due;
}

bool World::plant_due() { return now().time_since_epoch() > 1500ms && pick(20) == 0; }

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

// ---- processes

Trainer* World::trainer(std::uint64_t instance) {
  auto found = processes_.find(instance);
  return found == processes_.end() ? nullptr : dynamic_cast<Trainer*>(found->second);
}

void World::start_trainer(std::uint32_t replica, std::uint32_t rank) {
  auto& place = trainers_[replica][rank];
  if (place) return;
  place = std::make_unique<Trainer>(*this, replica, rank);
  processes_[place->instance] = place.get();
  note("replica {} rank {} starts", replica, rank);
  after_of(*place, between(1us, 2ms), [trainer = place.get()] { trainer->look_for_daemon(); });
}

void World::kill_trainer(std::uint32_t replica, std::uint32_t rank, const std::string& why) {
  auto& place = trainers_[replica][rank];
  if (!place) return;
  note("replica {} rank {} ends: {}", replica, rank, why);
  processes_.erase(place->instance);
  const auto connection = place->connection;
  place.reset();
  if (Daemon* daemon = daemons_[replica].get(); daemon != nullptr && connection.value != 0)
    after_of(*daemon, between(10us, 2ms),
             [daemon, connection] { daemon->drop(connection, "its process ended", membership::Node::Gone::ended); });
  // Its supervisor starts it again.
  after(between(10ms, 300ms), [this, replica, rank] { start_trainer(replica, rank); });
}

void World::trainer_exits(Trainer& trainer, const std::string& why) {
  count("trainer gave up");
  after_of(trainer, 1us,
           [this, replica = trainer.replica, rank = trainer.rank, why] { kill_trainer(replica, rank, why); });
  trainer.stopped = true;  // it does nothing more
}

void World::start_daemon(std::uint32_t node) {
  if (daemons_[node]) return;
  daemons_[node] = std::make_unique<Daemon>(*this, node);
  processes_[daemons_[node]->instance] = daemons_[node].get();
  note("the daemon of node {} starts", node);
}

void World::kill_daemon(std::uint32_t node) {
  if (!daemons_[node]) return;
  note("the daemon of node {} is killed", node);
  if (daemons_[node]->link != 0) close_link(daemons_[node]->link);
  processes_.erase(daemons_[node]->instance);
  daemons_[node].reset();
  for (auto& trainer : trainers_[node])
    if (trainer && trainer->connection.value != 0)
      after_of(*trainer, between(1us, 1ms), [raw = trainer.get(), connection = trainer->connection] {
        if (raw->connection == connection) raw->on_daemon_gone();
      });
  after(between(10ms, 200ms), [this, node] { start_daemon(node); });
}

// ---- the coordinator

void World::start_coordinator() {
  if (coordinator_) return;
  ++coordinator_life_;
  coordinator_ = std::make_unique<membership::Coordinator>(job);
  if (auto read = membership::parse_log(disk_, "the log"); !read) {
    checker_.violate("no-garbage", read.error().message);
  } else {
    if (read->whole < disk_.size()) count("torn log");
    disk_.resize(read->whole);
    if (read->records.size() != log_.size())
      checker_.violate("one-decision",
                       fmt::format("{} of {} records are read back", read->records.size(), log_.size()));
    log_ = std::move(read->records);
  }
  note("the coordinator starts, with {} records", log_.size());
  if (auto recovered = coordinator_->recover(log_, now()); !recovered)
    checker_.violate("no-garbage",
                     fmt::format("the coordinator can't read its own log: {}", recovered.error().message));
}

void World::kill_coordinator(const std::string& why) {
  if (!coordinator_) return;
  note("the coordinator ends: {}", why);
  coordinator_.reset();
  crash_in_append_ = false;
  while (!links_.empty()) drop_link(links_.begin()->first);
  if (planted(Plant::forget_a_decision) && !log_.empty() && log_.back().has_committed()) {
    log_.pop_back();
    disk_ = membership::log_bytes(log_, 0);
  }
  after(between(20ms, 500ms), [this] { start_coordinator(); });
}

void World::carry_out(membership::Actions actions) {
  if (!actions.append.empty() && disk_full_) {
    disk_full_ = false;
    return kill_coordinator("its disk is full");
  }
  const bool crash = !actions.append.empty() && crash_in_append_;
  if (!actions.append.empty()) {
    Bytes written = membership::log_bytes(actions.append, disk_.size());
    if (crash) written.resize(pick(written.size() + 1));
    disk_.insert(disk_.end(), written.begin(), written.end());
    if (crash) {
      const auto read = membership::parse_log(disk_, "the log");
      REJOIN_CHECK(read.has_value(), "{}", read.error());
      actions.append.resize(read->records.size() - log_.size());
    }
  }
  for (const auto& record : actions.append) {
    if (record.has_epoch()) {
      count("epoch begun");
      std::string members;
      for (const auto& m : record.epoch().members())
        members += fmt::format(" {}{}", m.replica(), m.catching_up() ? "c" : "");
      note("epoch {} from step {}:{} ({})", record.epoch().epoch(), record.epoch().step(), members,
           record.epoch().reason());
    }
    if (record.has_committed()) {
      count("step committed");
      note("step {} is committed in epoch {}", record.committed().step(), record.committed().epoch());
      on_committed(record.committed());
    }
    if (record.has_rolled_back()) {
      count("rolled back");
      note("rolled back to {}", record.rolled_back().version());
      std::erase_if(outcome_.committed,
                    [&](const auto& committed) { return committed.step > record.rolled_back().version(); });
    }
    log_.push_back(record);
    checker_.on_record(record);
  }
  if (crash) return kill_coordinator("a crash while it wrote");
  for (const auto& line : actions.notes) note("coordinator: {}", line);
  for (auto& [id, message] : actions.send) {
    auto found = links_.find(id.value);
    if (found == links_.end()) continue;
    Link& link = found->second;
    after(in_order(link.last_down, control_delay(link.node, false)),
          [this, number = id.value, node = link.node, message = std::move(message)] {
            Daemon* daemon = daemons_[node].get();
            if (daemon != nullptr && daemon->link == number) daemon->on_word(message);
          });
  }
  for (const auto& node : actions.close) drop_link(node.value);
}

void World::drop_link(std::uint64_t number) {
  auto gone = links_.extract(number);
  if (gone.empty()) return;
  const Duration noticed = between(10us, 1ms);
  after(noticed + control_delay(gone.mapped().node, false), [this, number, node = gone.mapped().node] {
    if (Daemon* daemon = daemons_[node].get(); daemon != nullptr && daemon->link == number) daemon->on_link_down();
  });
}

Duration World::control_delay(std::uint32_t node, bool up) {
  const TimePoint blocked = up ? up_blocked_[node] : down_blocked_[node];
  Duration delay(static_cast<std::int64_t>(10'000 + random_() % 300'000));
  if (const SlowLink& link = slow_links_[node]; link.until > now()) delay += up ? link.out : link.in;
  return blocked > now() ? blocked - now() + delay : delay;
}

void World::connect(Daemon& daemon) {
  if (!coordinator_ || up_blocked_[daemon.node] > now() || down_blocked_[daemon.node] > now()) return;
  const std::uint64_t number = next_number();
  after_of(daemon, control_delay(daemon.node, true), [this, number, raw = &daemon, life = coordinator_life_] {
    if (!coordinator_ || life != coordinator_life_ || raw->link != 0) return;
    links_[number].node = raw->node;
    raw->on_link_up(number);
  });
}

void World::close_link(std::uint64_t number) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  after(in_order(found->second.last_up, control_delay(found->second.node, true)), [this, number] {
    if (links_.erase(number) > 0) carry_out(coordinator_->on_node_lost(membership::NodeId(number), now()));
  });
}

void World::to_coordinator(std::uint64_t number, proto::FromNode message) {
  auto found = links_.find(number);
  if (found == links_.end()) return;
  Link& link = found->second;
  after(in_order(link.last_up, control_delay(link.node, true)), [this, number, message = std::move(message)] {
    if (links_.contains(number)) carry_out(coordinator_->on_message(membership::NodeId(number), message, now()));
  });
}

// ---- the run

void World::tick() {
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer) trainer->heartbeat();
  for (auto& daemon : daemons_)
    if (daemon) daemon->tick();
  if (coordinator_) carry_out(coordinator_->on_tick(now()));
  after(job.silence / 16, [this] { tick(); });
}

bool World::settled() const {
  if (!coordinator_ || coordinator_->members().size() != options_.replicas) return false;
  return std::none_of(coordinator_->members().begin(), coordinator_->members().end(),
                      [](const auto& member) { return member.catching_up; });
}

void World::on_committed(const proto::LogRecord::Committed& record) {
  Outcome::Committed committed{.at = seconds(now().time_since_epoch()), .step = record.step()};
  if (!outcome_.committed.empty()) committed.samples = outcome_.committed.back().samples;
  double sum = 0, count = 0;
  for (const auto& member : record.members()) {
    for (const auto& range : member.batch()) committed.samples += range.end() - range.begin();
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank)
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
  Fault fault{.kind = kinds[pick(std::size(kinds))], .lasting = 300ms};
  fault.replica = static_cast<std::uint32_t>(pick(options_.replicas));
  fault.rank = static_cast<std::uint32_t>(pick(options_.ranks));
  happen(fault);
  ++failures_;
  next_failure_ = now() + fault.lasting + between(100ms, 300ms);  // what hangs is noticed only after a while
  faults_end_ = now();
  return true;
}

// How things stand, for whoever reads the trace of a failure.
void World::describe() {
  for (const auto& [id, replica] : coordinator_->replicas())
    for (const auto& standing : replica.standings)
      note("the coordinator knows replica {} ranks {}: incarnation {}, {}connected with {}", id, standing.ranks.text(),
           replica.incarnation, standing.caught_up ? "caught up, " : "", fmt::join(standing.links, " "));
  for (const auto& line : coordinator_->waiting_for(now())) note("the step waits for {}", line);
  for (auto& ranks : trainers_)
    for (auto& trainer : ranks)
      if (trainer) note("{}", trainer->describe());
}

Outcome World::run() {
  const TimePoint began = now();
  start_coordinator();
  for (std::uint32_t node = 0; node < options_.replicas; ++node) start_daemon(node);
  for (std::uint32_t replica = 0; replica < options_.replicas; ++replica)
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) start_trainer(replica, rank);
  for (const auto& fault : outcome_.faults) after(fault.at, [this, fault] { happen(fault); });
  faults_end_ = began + kFaultsFor;
  tick();

  std::uint64_t target = 0;  // committed steps that prove that it goes on; 0: not all are back
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
    for (auto& ranks : trainers_)
      for (auto& trainer : ranks)
        if (trainer && !trainer->woken && !trainer->engine->arm()) wake(*trainer);
    for (auto& daemon : daemons_)
      if (daemon && !daemon->woken && !daemon->engine->arm()) wake(*daemon);
    if (options_.run_for && !go_on_long()) break;
    if (now() < faults_end_) continue;
    crash_in_append_ = disk_full_ = false;
    if (!settled()) {
      target = 0;
    } else if (options_.run_for) {
      faults_end_ = now();  // it is whole: no limit until the next failure
    } else if (target == 0) {
      target = coordinator_->committed().value + kStepsAfter;
    } else if (coordinator_->committed().value >= target) {
      break;
    }
    if (now() > faults_end_ + kSettled)
      checker_.violate("progress",
                       fmt::format("{:.0f} s after the last fault: {}", seconds(kSettled),
                                   coordinator_ ? fmt::format("step {} is committed, {} members",
                                                              coordinator_->committed(), coordinator_->members().size())
                                                : "no coordinator"));
  }
  if (outcome_.events >= max_events) checker_.violate("progress", "it goes round in circles");
  if (!checker_.violation()) checker_.on_end(log_, coordinator_->ledger());
  if (checker_.violation() && coordinator_) describe();
  if (checker_.violation()) note("VIOLATION {}: {}", checker_.violation()->invariant, checker_.violation()->what);
  outcome_.violation = checker_.violation();
  outcome_.virtual_seconds = seconds(now() - began);
  if (!options_.trace) outcome_.trace.assign(recent_.begin(), recent_.end());
  return std::move(outcome_);
}

}  // namespace rejoin::sim
