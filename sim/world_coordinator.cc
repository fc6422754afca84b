// The simulated coordinator's disk, its operator, and what the judges see of its decisions.
#include <algorithm>

#include "base/deadlines.h"
#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {

// The operator reads the status now and then. Where the job waits to be told that it may go back, and does so for a
// while, they start the coordinator with that.
void World::let_operator_act() {
  const auto wanted = deciding() != nullptr ? deciding()->wants_roll_back() : std::nullopt;
  if (!wanted) {
    roll_back_wanted_since_ = {};
  } else if (roll_back_wanted_since_ == TimePoint{}) {
    roll_back_wanted_since_ = now();
  } else if (now() - roll_back_wanted_since_ > job.silence) {
    count("operator: roll back");
    // Who is asked for the first time may say the step alone.
    auto word = deciding()->word_for(*wanted);
    if (!last_roll_back_ && words_random_.one_in(2)) word.said_at.reset();
    give_word({.roll_back_to = word, .drop = {}}, fmt::format("its operator says --roll-back-to {}", word.text()));
  }
  if (deciding() != nullptr && deciding()->stopped()) drop_who_is_wrong();
  end_strangers();
  check_ends();
  check_isolation(isolation_.check(now(), job.silence));
  see_who_is_healthy();
  check_promptness();
  after(job.silence / 4, [this] { let_operator_act(); });
}

// Daemons forget who was out by decisions that are not in a log that was put back to an older copy.
void World::check_ends() {
  if (checkers_.size() > 1) return;
  const CoordinatorProcess* leads = leader();
  const auto tells = [&](std::uint64_t instance) {
    const auto found = processes_.find(instance);
    const auto* daemon = found == processes_.end() ? nullptr : dynamic_cast<const Daemon*>(found->second);
    return daemon != nullptr && !daemon->stopped && daemon->hears_who_decides() && !leads->stopped &&
           now() > felt_until_;
  };
  // After a restart of the coordinator all have the time to come back that others need for it; but where all others are
  // there nobody does.
  std::map<ReplicaId, Duration> waited_for;
  if (leads != nullptr) {
    for (auto id : leads->decisions()->blocked_on())
      waited_for[id] = deadlines::kOthersComeBack.of(job.silence) + job.silence;
    if (const auto lacks = now() > old_news_until_ ? who_alone_has_ended(tells) : std::nullopt)
      waited_for[*lacks] = job.silence / 2;
  }
  if (const auto wrong = ends_.check(now(), leads != nullptr ? leads->instance : 0, waited_for, tells))
    checker().violate("ends-are-heard", *wrong);
}

// Of all members, one of which contributes, all processes are there but for those of one replica, which are over.
std::optional<ReplicaId> World::who_alone_has_ended(const Ends::Tells& tells) const {
  std::optional<ReplicaId> lacks;
  bool goes_on = false;
  for (const auto& member : leader()->decisions()->members()) {
    bool all_there = true;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      const Trainer* one = trainers_[member.replica.value][rank].get();
      const Daemon* daemon = one != nullptr ? daemons_[one->machine].get() : nullptr;
      if (one == nullptr && ends_.has_heard({member.replica.value, rank})) all_there = false;
      else if (daemon == nullptr || one->stopped || one->incarnation() != member.incarnation ||
               !daemon->knows(one->connection) || !tells(daemon->instance))
        return std::nullopt;
    }
    goes_on |= all_there && !member.catching_up;
    if (!all_there && std::exchange(lacks, member.replica)) return std::nullopt;
  }
  return goes_on ? lacks : std::nullopt;
}

void World::give_word(const Word& word, const std::string& why) {
  for (auto& one : words_) one = word;
  kill_coordinators(why);
}

membership::JobConfig World::job_to_start(std::uint32_t coordinator) {
  membership::JobConfig config = job;
  config.id += logs_lost_ << 32 | std::uint64_t{coordinator} << 24;  // a new log is another job's
  Word& given = words_[coordinator];
  // In some jobs it stays in the settings, or stands there although nobody has asked for it.
  if (words_stay_ && words_random_.one_in(16)) given.roll_back_to = Step(words_random_.pick(step_written_ + 3));
  config.roll_back_to = given.roll_back_to;
  config.drop = std::exchange(given.drop, std::nullopt);
  allowed_to_roll_back_[coordinator].reset();
  if (given.roll_back_to && is_for_now(*given.roll_back_to))
    allowed_to_roll_back_[coordinator] = given.roll_back_to->to;
  if (given.roll_back_to && !allowed_to_roll_back_[coordinator]) count("a word of an earlier loss stays");
  if (!words_stay_) given = {};
  return config;
}

// A word that names its loss is for that one; another, until the job has gone back by it and then on.
bool World::is_for_now(const membership::JobConfig::RollBack& word) const {
  if (word.said_at) return *word.said_at == steps_ever_;
  return !last_roll_back_ || !gone_on_since_;
}

World::Append World::append(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return Append::done;
  if (std::exchange(disk_full_, false)) {
    kill_coordinator(0, "its disk is full");
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
    kill_coordinator(0, "a crash while it wrote");
    return Append::failed;
  }
  if (slow_append_ > Duration{}) stop(*coordinators_[0], std::exchange(slow_append_, {}));
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
      checker().violate("no-drift", fmt::format("a false alarm: {}", record.epoch().reason()));
    check_isolation(isolation_.on_epoch(record.epoch(), now()));
    on_moment(Moment::epoch, 0);
    check_protocol(record.epoch());
    count_crossings(record.epoch());
  }
  if (record.has_committed()) {
    count("step committed");
    if (record.committed().has_balance()) count("shares changed");
    note("step {} is committed in epoch {}", record.committed().step(), record.committed().epoch());
    on_committed(record.committed());
    isolation_.on_commit(now());
    promptness_.put_off(now());
    // What was said before it is over.
    std::ranges::fill(allowed_to_roll_back_, std::nullopt);
    on_moment(Moment::commit, 0);
  }
  if (record.has_rolled_back()) {
    count("rolled back");
    const Step to(record.rolled_back().version());
    note("rolled back to {}", to);
    const bool allowed =
        std::ranges::any_of(allowed_to_roll_back_, [&](const auto& word) { return word && to >= *word; });
    if (to.value < record.rolled_back().from() && !allowed)
      checker().violate("state-survives", fmt::format("the job goes back to step {} without an operator's word", to));
    // Who was stopped, and has lost its place to another, goes on with what it has heard before.
    for (const auto& ranks : trainers_)
      for (const auto& trainer : ranks)
        if (trainer && has_rival(trainer->replica, trainer->rank) && trainer->has_heard_more_than(0, 0))
          trainer->leave_behind(epoch_written_);
    std::erase_if(outcome_.committed, [&](const auto& committed) { return committed.step > to.value; });
    // Later ones are of what was given up. The operator removes them.
    for (auto& of_replica : checkpoints_) of_replica.erase(of_replica.upper_bound(to.value), of_replica.end());
  }
  epoch_written_ = std::max<std::uint64_t>(epoch_written_, record.epoch().epoch());
  step_written_ = std::max<std::uint64_t>({step_written_, record.committed().step(), record.rolled_back().version()});
  if (record.has_committed() && finished()) count("job finished"), isolation_.end();
  count_steps(record);
  log_.push_back(record);
  checker().on_record(record);
  survivors_.on_record(record, holders_of(record));
  check_survivors();
}

void World::count_steps(const proto::LogRecord& record) {
  const auto& back = record.rolled_back();
  if (record.has_committed()) ++steps_ever_, gone_on_since_ = true;
  if (back.version() > back.from()) steps_ever_ += back.version() - back.from();
  if (back.version() < back.from()) last_roll_back_ = Step(back.version()), gone_on_since_ = false;
}

// What all members of an epoch are said to speak, they do.
void World::check_protocol(const proto::LogRecord::EpochBegun& begun) {
  if (!shape.upgrade) return;
  const bool newer = begun.protocol() > membership::kSilentProtocol;
  count(newer ? "epoch of the newer protocol" : "epoch of the older protocol");
  for (const auto& member : begun.members())
    for (const auto& trainer : trainers_[member.replica()])
      if (newer && trainer && !trainer->ended && trainer->incarnation().value == member.incarnation() &&
          trainer->is_older(true))
        checker().violate("no-garbage", fmt::format("epoch {} has protocol {}, which replica {} rank {} does not speak",
                                                    begun.epoch(), begun.protocol(), trainer->replica, trainer->rank));
}

// A replica all of whose processes live and hold it. A second process that has a rank's place is one of them.
void World::add_holder(Survivors::Holders& holders, std::uint32_t replica,
                       const std::function<bool(const Trainer&)>& holds) const {
  const auto lives_and_holds = [&](const Trainer* trainer) {
    return trainer != nullptr && !trainer->ended && is_of_the_job(*trainer) && holds(*trainer);
  };
  std::vector<std::uint64_t> processes;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const Trainer* first = trainers_[replica][rank].get();
    const Trainer* second = rival_of(replica, rank);
    if (lives_and_holds(first) && !may_lose_its_place(*first)) processes.push_back(first->instance);
    else if (lives_and_holds(second)) processes.push_back(second->instance);
  }
  if (processes.size() == shape.ranks) holders[replica] = std::move(processes);
}

Survivors::Holders World::holders_of(const proto::LogRecord& record) const {
  Survivors::Holders holders;
  for (const auto& member : record.committed().members())
    add_holder(holders, member.replica(), [&](const Trainer& trainer) {
      return trainer.incarnation().value == member.incarnation() && trainer.reduced(record.committed().step());
    });
  for (const auto& member : record.epoch().members())
    if (!member.catching_up())
      add_holder(holders, member.replica(),
                 [&](const Trainer& trainer) { return trainer.incarnation().value == member.incarnation(); });
  return holders;
}

void World::on_replica_status() {
  Survivors::Holders holders;
  if (deciding() == nullptr) return;
  const auto& decisions = *deciding();
  for (const auto& member : decisions.members())
    if (member.catching_up && decisions.caught_up(member))
      add_holder(holders, member.replica.value,
                 [&](const Trainer& trainer) { return trainer.incarnation() == member.incarnation; });
  survivors_.add(std::move(holders));
}

// What is written when the log is compacted: what the coordinator knows then must be what the log would lead to, but
// for what it has heard beyond that.
void World::compare_with_log(const proto::LogRecord& snapshot, std::size_t records) {
  count("log compared");
  membership::Coordinator whole(job), compacted(job);
  const std::vector<proto::LogRecord> log(log_.begin(), log_.begin() + static_cast<std::ptrdiff_t>(records));
  if (!whole.recover(log, now()) || !compacted.recover({snapshot}, now()))
    return checker().violate("no-garbage", "the log, or a snapshot, can't be read");
  const auto without_reasons = [](proto::LogRecord record) {
    record.mutable_snapshot()->clear_ended();
    record.mutable_snapshot()->clear_out();
    return record.SerializeAsString();
  };
  if (without_reasons(whole.snapshot()) != without_reasons(compacted.snapshot()))
    checker().violate("one-decision",
                      fmt::format("the snapshot of {} records is of another state than they lead to", records));
}

void World::check_survivors() {
  if (auto what = survivors_.take_violation()) checker().violate("state-survives", *what);
}

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

}  // namespace rejoin::sim
