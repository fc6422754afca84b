#include "daemon/job_history.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/lower_median.h"
#include "base/text.h"

namespace rejoin::daemon {

namespace {

constexpr std::size_t kLongestReason = 400;  // bytes

// It is more than a slow one.
bool stands_still(Duration step, Duration usual) {
  return step > std::max<Duration>(10 * usual, std::chrono::seconds(1));
}

std::optional<Duration> median_of(std::vector<Duration> values) {
  if (values.empty()) return {};
  return lower_median(std::move(values));
}

}  // namespace

void Histogram::add(double value) {
  ++counts_[static_cast<std::size_t>(std::ranges::lower_bound(bounds_, value) - bounds_.begin())];
  sum_ += value;
}

const char* JobHistory::name(Cause cause) {
  constexpr std::array<const char*, kCauses> names{"start",  "lost",     "silent",   "dropped", "returned",
                                                   "joined", "promoted", "repeated", "protocol"};
  return names[static_cast<std::size_t>(cause)];
}

void JobHistory::on_records(const std::vector<proto::LogRecord>& records, std::optional<TimePoint> now) {
  for (const auto& record : records) {
    if (record.has_epoch()) on_epoch(record.epoch(), now);
    if (record.has_committed()) on_committed(record.committed(), now);
    if (record.has_dropped()) dropped_ = true;
    if (record.has_snapshot()) on_snapshot(record.snapshot());
    if (record.has_rolled_back())
      while (!steps_.empty() && steps_.back().step > record.rolled_back().version()) steps_.pop_back();
  }
}

// From here on the time counts: that before is nobody's.
void JobHistory::on_lead(TimePoint now) {
  committed_at_.reset();
  decides_since_ = now;
  if (contributors() > 0) begin_step(now);
}

// Whoever has asked has heard of the step under way, too.
void JobHistory::on_standby(TimePoint now, bool running) {
  effective_ = effective(now, running);
  committed_at_.reset();
  decides_since_.reset();
}

void JobHistory::begin_step(TimePoint now) { committed_at_ = contributed_at_ = now; }

double JobHistory::contributed_until(TimePoint now) const { return seconds(now - contributed_at_) * contributors(); }

void JobHistory::on_committed(const proto::LogRecord::Committed& committed, std::optional<TimePoint> now) {
  StepRow row{.step = committed.step(), .took = {}, .broken = std::exchange(broken_, 0)};
  if (now && committed_at_) {
    row.took = *now - *committed_at_;
    const Duration usual = usual_step();
    const Duration beyond = std::max(Duration{}, *row.took - usual);
    step_seconds_.add(seconds(*row.took));
    effective_.total += *row.took;
    if (row.broken > 0 || stands_still(*row.took, usual)) effective_.lost += beyond;
    effective_.replica_seconds += contributed_until(*now);
    if (lost_at_ && last_failure_) {
      last_failure_->recovery = *now - *lost_at_;
      last_failure_->cost = beyond;
      recovery_seconds_.add(seconds(*last_failure_->recovery));
    }
  }
  lost_at_.reset();
  committed_at_.reset();
  if (now) begin_step(*now);
  steps_.push_back(row);
  if (steps_.size() > kSteps) steps_.pop_front();
}

std::string JobHistory::states_of(const auto& members, const auto& suspended) const {
  std::string states(states_.size(), kAbsent);
  const auto set = [&](std::uint32_t replica, char state) {
    if (replica < states.size()) states[replica] = state;
  };
  for (const auto& out : suspended) set(out.replica(), kSuspended);
  for (const auto& m : members) set(m.replica(), m.catching_up() ? kCatchesUp : kContributes);
  return states;
}

JobHistory::Cause JobHistory::cause_of(const std::string& next) const {
  const auto any = [&](auto changed) {
    for (std::size_t i = 0; i < next.size(); ++i)
      if (changed(states_[i], next[i])) return true;
    return false;
  };
  const auto in = [](char state) { return state == kContributes || state == kCatchesUp; };
  if (dropped_) return Cause::dropped;
  if (!any([&](char before, char) { return in(before); })) return Cause::start;
  if (any([&](char before, char after) { return in(before) && after == kAbsent; })) return Cause::lost;
  if (any([&](char before, char after) { return in(before) && after == kSuspended; })) return Cause::silent;
  if (any([&](char before, char after) { return before == kSuspended && in(after); })) return Cause::returned;
  if (any([&](char before, char after) { return before == kAbsent && in(after); })) return Cause::joined;
  if (any([&](char before, char after) { return before == kCatchesUp && after == kContributes; }))
    return Cause::promoted;
  return Cause::repeated;
}

bool JobHistory::is_failure(Cause cause) const {
  return cause == Cause::lost || cause == Cause::silent || cause == Cause::dropped || cause == Cause::repeated;
}

void JobHistory::on_epoch(const proto::LogRecord::EpochBegun& begun, std::optional<TimePoint> now) {
  std::string next = states_of(begun.members(), begun.suspended());
  EpochRow row{.epoch = begun.epoch(),
               .step = begun.step(),
               .cause = cause_of(next),
               .reason = shortened(begun.reason(), kLongestReason),
               .states = next,
               .at = now};
  // Where it falls the step under way is repeated, as after other failures.
  const auto protocol_before = std::exchange(protocol_, begun.protocol());
  if (row.cause == Cause::repeated && protocol_before < protocol_) row.cause = Cause::protocol;
  dropped_ = false;
  if (is_failure(row.cause)) {
    ++broken_;
    if (now && !lost_at_) lost_at_ = now;
    if (now)
      last_failure_ = {.epoch = row.epoch, .step = row.step, .cause = row.cause, .reason = row.reason, .at = *now};
  }
  if (now) {
    ++by_cause_[static_cast<std::size_t>(row.cause)];
    note_absences(next, *now);
    if (committed_at_) effective_.replica_seconds += contributed_until(*now);
    contributed_at_ = *now;
    if (row.cause == Cause::start && !committed_at_) begin_step(*now);
  }
  states_ = std::move(next);
  epochs_.push_back(std::move(row));
  // What came before the oldest step that is kept says nothing of those that are, but for the last of it.
  const std::uint64_t oldest = steps_.empty() ? 0 : steps_.front().step;
  while (epochs_.size() > kMostEpochs || (epochs_.size() > kEpochs && epochs_[1].step <= oldest)) epochs_.pop_front();
}

void JobHistory::note_absences(const std::string& next, TimePoint now) {
  for (std::size_t i = 0; i < next.size(); ++i) {
    const bool was_in = states_[i] == kContributes || states_[i] == kCatchesUp;
    if (was_in && (next[i] == kAbsent || next[i] == kSuspended) && !out_since_[i]) out_since_[i] = now;
    if (next[i] != kContributes || !out_since_[i]) continue;
    absences_.push_back(now - *out_since_[i]);
    if (absences_.size() > 16) absences_.pop_front();
    out_since_[i].reset();
  }
}

// In place of all records before it; what they said is kept as far as it is known.
void JobHistory::on_snapshot(const proto::LogRecord::Snapshot& snapshot) {
  if (!epochs_.empty() && epochs_.back().epoch == snapshot.epoch()) return;
  states_ = states_of(snapshot.members(), snapshot.suspended());
  protocol_ = snapshot.protocol();
  epochs_.push_back({.epoch = snapshot.epoch(),
                     .step = snapshot.committed() + 1,
                     .cause = Cause::start,
                     .reason = "what was before is in older logs",
                     .states = states_,
                     .at = {}});
}

std::uint32_t JobHistory::contributors() const {
  return static_cast<std::uint32_t>(std::ranges::count(states_, kContributes));
}

std::optional<Duration> JobHistory::median_step() const {
  std::vector<Duration> took;
  for (const auto& row : steps_)
    if (row.took) took.push_back(*row.took);
  return median_of(std::move(took));
}

std::optional<double> JobHistory::steps_per_second() const {
  Duration time{};
  std::size_t count = 0;
  for (auto row = steps_.rbegin(); row != steps_.rend() && row->took && time <= std::chrono::seconds(10); ++row) {
    time += *row->took;
    ++count;
  }
  if (time == Duration{}) return {};
  return static_cast<double>(count) / seconds(time);
}

std::optional<Duration> JobHistory::median_absence() const { return median_of({absences_.begin(), absences_.end()}); }

JobHistory::Effective JobHistory::effective(TimePoint now, bool running) const {
  Effective all = effective_;
  if (!running || !committed_at_) return all;
  // The step under way may be one that gets on; what it has taken beyond the usual is lost where it is broken or late.
  const Duration so_far = now - *committed_at_;
  const Duration usual = usual_step();
  all.total += so_far;
  if (broken_ > 0 || stands_still(so_far, usual)) all.lost += std::max(Duration{}, so_far - usual);
  all.replica_seconds += contributed_until(now);
  return all;
}

void JobHistory::on_report(proto::Report report, TimePoint now) {
  if (report.replica() >= states_.size()) return;
  auto& of_replica = reports_[report.replica()];
  report.set_node(shortened(report.node(), 64));
  const std::pair daemon(report.daemon(), report.node());
  const std::size_t most = std::max(kMostNodes, 1024 * kMostNodes / states_.size());
  if (!of_replica.contains(daemon))  // where trainers start their daemons, each return is another one
    std::erase_if(of_replica, [&](const auto& one) { return now - one.second.at > kReportLasts; });
  if (of_replica.size() >= most && !of_replica.contains(daemon)) return;
  look_for_a_twin(report, now);
  while (report.rails_size() > 16) report.mutable_rails()->RemoveLast();
  of_replica[daemon] = {std::move(report), now};
  look_for_slow_hop(now);
}

// A daemon that was started again is another one with its name, but then the one before it says nothing any more.
void JobHistory::look_for_a_twin(const proto::Report& report, TimePoint now) {
  if (daemons_.size() >= 1024 * kMostNodes && !daemons_.contains(report.node())) return;
  Named& known = daemons_[report.node()];
  if (report.daemon() != known.daemon && now - known.heard <= kReportLasts) return void(known.other = true);
  if (report.daemon() != known.daemon) known = {.daemon = report.daemon()};
  else if (std::exchange(known.other, false)) ++known.returns;  // once is a report that came late
  known.heard = now;
  if (known.returns < 2 || !twins_.insert(report.node()).second) return;
  spdlog::warn("two daemons are called {}, and nothing tells which of them is meant: give each a --name of its own",
               report.node());
}

// Each daemon tells of its slowest hop: the one with the longest gap, if that is far from the others'.
void JobHistory::look_for_slow_hop(TimePoint now) {
  constexpr std::uint64_t least_us = 10'000, times = 3;
  if (now - looked_at_ < std::chrono::seconds(1)) return;  // of a large job many tell in each
  looked_at_ = now;
  std::vector<std::uint64_t> gaps;
  const proto::Report* longest = nullptr;
  for (const auto* one : reports(now)) {
    if (!one->report.has_slowest()) continue;
    gaps.push_back(one->report.slowest().gap_us());
    if (longest == nullptr || gaps.back() > longest->slowest().gap_us()) longest = &one->report;
  }
  if (gaps.size() < 3) return slow_hop_.reset();
  const std::uint64_t usual = lower_median(gaps);
  const auto& hop = longest->slowest();
  if (hop.gap_us() < std::max(least_us, times * usual)) return slow_hop_.reset();
  const bool same = slow_hop_ && slow_hop_->replica == longest->replica() && slow_hop_->rank == hop.rank() &&
                    slow_hop_->from == hop.from() && now - slow_hop_->seen <= kReportLasts;
  if (!same)
    slow_hop_ = SlowHop{.replica = longest->replica(),
                        .rank = hop.rank(),
                        .from = hop.from(),
                        .since_step = steps_.empty() ? 0 : steps_.back().step,
                        .since = now};
  slow_hop_->gap_us = hop.gap_us();
  slow_hop_->usual_us = usual;
  slow_hop_->seen = now;
}

std::optional<JobHistory::SlowHop> JobHistory::slow_hop(TimePoint now) const {
  if (!slow_hop_ || now - slow_hop_->seen > kReportLasts) return std::nullopt;
  return slow_hop_->seen - slow_hop_->since > kGapIsReported ? slow_hop_ : std::nullopt;
}

std::vector<const JobHistory::NodeReport*> JobHistory::reports(TimePoint now) const {
  std::vector<const NodeReport*> all;
  for (const auto& [replica, nodes] : reports_)
    for (const auto& [node, report] : nodes)
      if (now - report.at <= kReportLasts) all.push_back(&report);
  return all;
}

}  // namespace rejoin::daemon
