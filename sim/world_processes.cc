// The processes of the simulated cluster: how they run, stand still, end, and are started again.
#include <fmt/format.h>

#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

void World::deliver(Process& process, Duration delay, std::function<void()> action) {
  after_of(process, delay, [&process, action = std::move(action)]() mutable {
    if (process.stopped) process.queued.push_back(std::move(action));
    else action();
  });
}

void World::wake(Process& process) {
  if (process.stopped || std::exchange(process.woken, true)) return;
  after_of(process, process.until_run(), [this, &process] {
    process.woken = false;
    if (process.stopped) return;
    process.run();
    check_queues(process);
    (void)stands_for_memory(process);
  });
}

// Whoever has registered memory that takes its time stands in that call.
bool World::stands_for_memory(Process& process) {
  Duration taken{};
  for (const auto* rail : process.rails) taken += fabric_.take_registering(*rail);
  if (taken == Duration{} || process.ended) return false;
  if (taken > job.silence) count("registration of more than a silence");
  faults_end_ = std::max(faults_end_, now() + taken);
  stop(process, taken);
  return true;
}

void World::stop(Process& process, Duration lasting) {
  if (process.ended) return;
  process.stopped = true;
  process.stopped_until = std::max(process.stopped_until, now() + lasting);
  disturb(lasting);
  let_rival_stay(process);
  for (const auto* rail : process.rails) fabric_.stop(*rail);
  after_of(process, lasting, [this, &process] {
    if (process.ended || !process.stopped || now() < process.stopped_until) return;
    process.stopped = false;
    resumed_at_ = now();
    for (const auto* rail : process.rails) fabric_.resume(*rail);
    process.tick_after = process.random.one_in(2) ? 0 : process.random.pick(process.queued.size() + 1);
    while (!process.stopped && !process.unsent.empty()) {
      auto message = std::move(process.unsent.front());
      process.unsent.pop_front();
      send(process, std::move(message));
    }
    if (!process.stopped) process.on_resumed();
    go_on(process.instance);
  });
}

// What waited while it was stopped. It may be stopped again meanwhile, or end.
void World::go_on(std::uint64_t instance) {
  for (;;) {
    auto found = processes_.find(instance);
    if (found == processes_.end() || found->second->stopped) return;
    Process& process = *found->second;
    if (process.tick_due && (process.tick_after == 0 || process.queued.empty())) {
      process.tick_due = false;
      ring_timer(process);
    } else if (process.queued.empty()) {
      return wake(process);
    } else {
      if (process.tick_after > 0) --process.tick_after;
      auto action = std::move(process.queued.front());
      process.queued.pop_front();
      action();
    }
  }
}

void World::send(Process& process, std::function<void()> message) {
  if (process.stopped) return process.unsent.push_back(std::move(message));
  message();
  if (process.stops_after == 0 || --process.stops_after > 0) return;
  count("stopped within an introduction");
  health_.harm_all(now() + process.stops_for + 4 * job.silence);
  promptness_.end();
  faults_end_ = std::max(faults_end_, now() + process.stops_for);
  stop(process, process.stops_for);
}

void World::introduces(Process& process, std::uint32_t caller) {
  const auto due = interruptions_.extract(caller);
  if (due.empty()) return;
  process.stops_after = due.mapped().messages;
  process.stops_for = due.mapped().lasting;
}

void World::set_timer(Process& process, Duration delay) {
  after_of(process, delay, [this, &process] { ring_timer(process); });
}

void World::ring_timer(Process& process) {
  if (process.stopped) {
    process.tick_due = true;
    return;
  }
  const std::uint64_t instance = process.instance;
  process.tick();
  if (processes_.contains(instance)) set_timer(process, job.silence / 16);
}

Trainer* World::trainer(std::uint64_t instance) {
  auto found = processes_.find(instance);
  return found == processes_.end() ? nullptr : dynamic_cast<Trainer*>(found->second);
}

void World::set_going(Process& process) {
  processes_[process.instance] = &process;
  set_timer(process, process.random.between({}, job.silence / 16));
  if (const TimePoint until = suspended_until_[process.machine]; until > now()) stop(process, until - now());
}

std::optional<World::Checkpoint> World::checkpoint_of(std::uint32_t replica, std::uint32_t rank) const {
  const auto& written = checkpoints_[replica];
  for (auto last = written.rbegin(); last != written.rend(); ++last)
    if (last->second.size() == shape.ranks) return last->second.at(rank);
  return std::nullopt;
}

void World::write_checkpoint(std::uint32_t replica, std::uint32_t rank, Checkpoint checkpoint) {
  auto& written = checkpoints_[replica];
  const std::uint64_t version = checkpoint.version;
  checkpoint.records = whole_log_ ? whole_log_->records.size() : log_.size();
  written[version][rank] = std::move(checkpoint);
  if (written[version].size() == shape.ranks) written.erase(written.begin(), written.find(version));
}

void World::start_trainer(std::uint32_t replica, std::uint32_t rank) {
  auto& place = trainers_[replica][rank];
  if (place || over_.contains({replica, rank})) return;
  if (const TimePoint off = std::max(off_until_[node_of(replica, rank)], away_until_[replica]); off > now())
    return after(off - now(), [this, replica, rank] { start_trainer(replica, rank); });
  Trainer& trainer = start(place, std::make_unique<Trainer>(*this, replica, rank, node_of(replica, rank)));
  ends_.on_start({replica, rank});
  note("replica {} rank {} starts", replica, rank);
  if (const auto memory = memory_.extract({replica, rank}); !memory.empty()) {
    fabric_.refuse_memory(*trainer.rails[0], memory.mapped().refused);
    fabric_.slow_memory(*trainer.rails[0], memory.mapped().takes);
  }
  deliver(trainer, trainer.random.between(1us, 2ms), [&trainer] { trainer.look_for_daemon(); });
}

void World::kill_trainer(std::uint32_t replica, std::uint32_t rank, const std::string& why) {
  if (trainers_[replica][rank]) end_trainer(*trainers_[replica][rank], why);
}

void World::end_trainer(Trainer& trainer, const std::string& why, bool gave_up) {
  const std::uint32_t replica = trainer.replica, rank = trainer.rank, node = trainer.machine;
  auto& place = trainers_[replica][rank];
  note("replica {} rank {} ends: {}", replica, rank, why);
  survivors_.on_end(trainer.instance, gave_up, why);
  check_survivors();
  processes_.erase(trainer.instance);
  const auto connection = trainer.connection;
  const bool registered = trainer.incarnation() != Incarnation{}, heard = trainer.has_heard_more_than(0, 0);
  if (place.get() != &trainer) end_rival(trainer);
  else if (auto rival = take_rival(replica, rank)) place = std::move(rival);
  else place.reset();
  Random& random = supervisor_random_[node];
  Daemon* daemon = daemons_[node].get();
  // The end of one that has never had the place says nothing of who has.
  if (!place && registered && daemon != nullptr && daemon->knows(connection))
    ends_.on_end({replica, rank}, daemon->instance, heard, now());
  if (daemon != nullptr && connection.value != 0)
    deliver(*daemon, random.between(10us, 2ms),
            [daemon, connection] { daemon->drop(connection, "its process ended", membership::Node::Gone::ended); });
  // Its supervisor starts it again.
  if (!place) after(random.of_any_size(1ms, 300ms), [this, replica, rank] { start_trainer(replica, rank); });
}

void World::trainer_exits(Trainer& trainer, const std::string& why) {
  count("trainer gave up");
  check_last_step(trainer);
  check_health(trainer, why);
  if (now() <= disturbed_until_ && spared_.contains(trainer.instance))
    checker().violate("nobody-heard", fmt::format("replica {} rank {} is put out for a time in which no coordinator "
                                                  "heard anybody: {}",
                                                  trainer.replica, trainer.rank, why));
  after_of(trainer, 1us, [this, &trainer, why] { end_trainer(trainer, why, true); });
  trainer.ended = trainer.stopped = true;  // it does nothing more
}

void World::start_daemon(std::uint32_t node) {
  if (daemons_[node]) return;
  if (const TimePoint off = off_until_[node]; off > now())
    return after(off - now(), [this, node] { start_daemon(node); });
  start(daemons_[node], std::make_unique<Daemon>(*this, node));
  note("the daemon of node {} starts", node);
}

void World::kill_daemon(std::uint32_t node) {
  if (!daemons_[node]) return;
  note("the daemon of node {} is killed", node);
  daemons_[node]->uplink().end();
  processes_.erase(daemons_[node]->instance);
  daemons_[node].reset();
  for (Trainer* trainer : trainers_on(node)) {
    let_rival_stay(*trainer);
    if (trainer->connection.value != 0)
      deliver(*trainer, supervisor_random_[node].between(1us, 1ms),
              [trainer, connection = trainer->connection] { trainer->on_daemon_gone(connection); });
  }
  after(supervisor_random_[node].between(10ms, 200ms), [this, node] { start_daemon(node); });
}

void World::start_relay(std::uint32_t number) {
  if (relays_[number]) return;
  start(relays_[number], std::make_unique<Relay>(*this, number, nodes() + shape.coordinators + number));
  note("relay {} starts", number);
}

// Its supervisor starts it again after a while.
void World::kill_relay(std::uint32_t number, Duration lasting) {
  if (!relays_[number]) return;
  note("relay {} is killed", number);
  relays_[number]->uplink().end();
  processes_.erase(relays_[number]->instance);
  drop_links_to(shape.coordinators + number);
  relays_[number].reset();
  after(lasting, [this, number] { start_relay(number); });
}

void World::start_coordinator(std::uint32_t number) {
  auto& place = coordinators_[number];
  if (place) return;
  // On a machine whose clock stands meanwhile, and would go back.
  if (const TimePoint until = suspended_until_[nodes() + number]; until > now())
    return after(until - now(), [this, number] { start_coordinator(number); });
  if (shared()) {
    note("coordinator {} starts", number);
    start(place, std::unique_ptr<CoordinatorProcess>(
                     std::make_unique<ReplicatedCoordinator>(*this, number, nodes() + number)));
    return;
  }
  if (auto read = membership::parse_log(disk_, "the log"); !read) {
    checker().violate("no-garbage", read.error().message);
  } else {
    if (read->intact < disk_.size()) count("torn log");
    disk_.resize(read->intact);
    if (read->records.size() != log_.size())
      checker().violate("one-decision",
                        fmt::format("{} of {} records are read back", read->records.size(), log_.size()));
    log_ = std::move(read->records);
  }
  note("the coordinator starts, with {} records", log_.size());
  start(place, std::unique_ptr<CoordinatorProcess>(std::make_unique<Coordinator>(*this, nodes(), log_)));
}

void World::kill_coordinators(const std::string& why) {
  for (std::uint32_t i = 0; i < shape.coordinators; ++i) kill_coordinator(i, why);
}

void World::kill_coordinator(std::uint32_t number, const std::string& why) {
  auto& place = coordinators_[number];
  if (!place) return;
  const bool of_the_job = place->of_the_job();
  note("the coordinator{} ends: {}", shared() ? fmt::format(" {}", number) : "", why);
  disturb({});
  processes_.erase(place->instance);
  place->ended = place->stopped = true;
  // It may be what is being run.
  after({}, [gone = std::shared_ptr<CoordinatorProcess>(std::move(place))] {});
  crash_in_append_ = false;
  drop_links_to(number);
  if (shared()) {
    after(supervisor_random_[nodes() + number].between(20ms, 500ms), [this, number] { start_coordinator(number); });
    return;
  }
  if (planted(Plant::forget_a_decision) && of_the_job && !log_.empty() && log_.back().has_committed()) {
    log_.pop_back();
    disk_ = membership::log_bytes(log_, 0);
  }
  after(supervisor_random_[nodes()].between(20ms, 500ms), [this] { start_coordinator(0); });
}

}  // namespace rejoin::sim
