// The coordinator's log, or what is in the store, is put back to an older copy, and members go on. Who has heard of
// more than that is neither sent away nor taken in, and nothing is decided that has been decided otherwise. The
// operator puts the whole log back, or ends the trainers and goes on from the older one (docs/operations.md, "the log
// is an older copy"): what follows on that is another history.
#include <algorithm>

#include "sim/history_mark.h"
#include "sim/world.h"

namespace rejoin::sim {

namespace {

constexpr std::size_t kHistories = 200;

bool decides(const proto::LogRecord& record) {
  return record.has_epoch() || record.has_committed() || record.has_rolled_back();
}

}  // namespace

void World::begin_older_log(const Fault& fault) {
  Random random(fault.detail);
  if (whole_log_ || logs_lost_ > 0 || log_.size() < 2 || checkers_.size() > kHistories) return;
  if (options_.plant != Plant::none) return;
  const std::size_t most = std::min<std::size_t>(log_.size() - 1, random.one_in(2) ? 4 : 200);
  const std::size_t kept = log_.size() - 1 - random.pick(most);
  const bool whole = random.one_in(2);
  kill_coordinators("its log is put back to an older copy");
  count("log put back");
  note("of {} records the older copy has {}", log_.size(), kept);
  whole_log_ = WholeLog{.records = log_, .history = history_, .put_back_to = kept, .processes = numbers_};
  put_back({whole_log_->records.begin(), whole_log_->records.begin() + static_cast<std::ptrdiff_t>(kept)});
  history_ = checkers_.size();
  checkers_.push_back(new_checker());
  checkers_.back().go_on_from(checkers_[whole_log_->history], log_);
  after(fault.lasting, [this, whole] { end_older_log(whole); });
}

// The whole log, where the older one has decided nothing.
void World::end_older_log(bool whole) {
  const WholeLog before = *std::exchange(whole_log_, std::nullopt);
  felt_for({});
  const auto since = log_.begin() + static_cast<std::ptrdiff_t>(before.put_back_to);
  if (whole && std::none_of(since, log_.end(), decides)) {
    kill_coordinators("its whole log is put back");
    count("the whole log put back");
    // The older log may have given them incarnations that others have.
    std::vector<Trainer*> meanwhile;
    for (const auto& [instance, process] : processes_)
      if (auto* one = dynamic_cast<Trainer*>(process); one != nullptr && one->registered_in() == history_)
        meanwhile.push_back(one);
    for (Trainer* one : meanwhile) end_trainer(*one, "it has come while the log was an older copy");
    put_back(before.records);
    history_ = before.history;
    return;
  }
  kill_coordinators("its operator goes on from the older copy");
  kill_rivals("its operator goes on from the older copy of the log");
  for (std::uint32_t r = 0; r < shape.replicas; ++r)
    for (std::uint32_t i = 0; i < shape.ranks; ++i)
      kill_trainer(r, i, "its operator goes on from the older copy of the log");
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < before.put_back_to; ++i)
    if (const auto& record = before.records[i]; record.has_committed()) last = record.committed().step();
    else if (record.has_rolled_back()) last = record.rolled_back().version();
  // What was written since the copy was made is of what is given up, also where the copy has that step.
  const auto written_since = [&](const auto& of_version) {
    return of_version.first > last || std::ranges::any_of(of_version.second, [&](const auto& of_rank) {
             return of_rank.second.records > before.put_back_to;
           });
  };
  for (auto& of_replica : checkpoints_) std::erase_if(of_replica, written_since);
  count("went on from the older log");
}

void World::put_back(const std::vector<proto::LogRecord>& records) {
  log_ = records;
  disk_ = membership::log_bytes(log_, 0);
  epoch_written_ = step_written_ = 0;
  std::uint64_t committed = 0;
  last_roll_back_.reset();
  gone_on_since_ = false;
  steps_ever_ = 0;
  for (const auto& record : log_) {
    count_steps(record);
    epoch_written_ = std::max<std::uint64_t>(epoch_written_, record.epoch().epoch());
    if (record.has_committed()) committed = record.committed().step();
    if (record.has_rolled_back()) committed = record.rolled_back().version();
    step_written_ = std::max(step_written_, committed);
  }
  store_.clear();
  if (shared()) store_.begin_with(log_);
  for (auto& copy : copied_)
    if (copy > log_.size()) copy = 0;  // another --log-directory
  survivors_.begin_with(committed);
  std::fill(words_.begin(), words_.end(), Word{});
  std::erase_if(outcome_.committed, [&](const auto& one) { return one.step > committed; });
}

std::optional<std::size_t> World::history_of(const proto::Plan& plan) const {
  return checkers_.size() > 1 ? mark_of(plan) : std::nullopt;
}

bool World::is_later(const proto::RankUp& up) const {
  return up.incarnation() != 0 && up.job() == id_of_the_job() &&
         (up.heard_epoch() > epoch_written_ || up.heard_committed() > step_written_);
}

// Who was started after that has heard of nothing which this log does not have.
void World::check_that_it_heard_them(const proto::RankUp& up) {
  for (const auto& [instance, process] : processes_) {
    const auto* one = dynamic_cast<const Trainer*>(process);
    if (one == nullptr || one->rank_instance != up.instance()) continue;
    const bool new_here = whole_log_ ? instance > whole_log_->processes : one->history() == history_;
    if (new_here && !one->has_heard_more_than(epoch_written_, step_written_))
      checker().violate("progress", fmt::format("replica {} rank {} has heard nothing later than the log has, and its "
                                                "daemon says so of epoch {} and step {}",
                                                up.replica(), up.rank(), up.heard_epoch(), up.heard_committed()));
  }
}

void World::check_that_nobody_is_sent_away(const proto::Evicted& evicted) {
  for (const auto& [instance, process] : processes_) {
    const auto* one = dynamic_cast<const Trainer*>(process);
    if (one == nullptr || one->history() == history_ || one->replica != evicted.replica() || !is_of_the_job(*one))
      continue;
    if (one->incarnation().value == evicted.incarnation() && one->has_trained() &&
        one->has_heard_more_than(epoch_written_, step_written_))
      checker().violate("state-survives",
                        fmt::format("replica {} rank {}, which has heard more than the older log has, is sent away: {}",
                                    one->replica, one->rank, evicted.reason()));
  }
}

}  // namespace rejoin::sim
