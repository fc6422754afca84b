// What a coordinator remembers of its job for people: how long steps took, who was in, what failures cost, and what the
// daemons tell of streams, hops and rails. Metrics and the page are made of it; nothing is decided by it. It has no
// clock, and its size is bounded.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "control.pb.h"

namespace rejoin::daemon {

// Counts by ranges, as Prometheus has them.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void add(double value);
  const std::vector<double>& bounds() const { return bounds_; }
  const std::vector<std::uint64_t>& counts() const { return counts_; }  // one more than bounds: what is above the last
  double sum() const { return sum_; }

 private:
  std::vector<double> bounds_;
  std::vector<std::uint64_t> counts_;
  double sum_ = 0;
};

class JobHistory {
 public:
  static constexpr std::size_t kSteps = 200, kEpochs = 64;  // that are kept; more epochs where the steps are of them
  static constexpr std::size_t kMostEpochs = 256;
  // That tell of one replica, of a job of many; all that do may be 1,024 times as many.
  static constexpr std::size_t kMostNodes = 64;
  static constexpr Duration kReportLasts = std::chrono::seconds(10);
  static constexpr Duration kUsualIfUnknown = std::chrono::minutes(1);
  static constexpr Duration kGapIsReported = std::chrono::seconds(20);  // at most, after it was

  // Why an epoch was begun, by what it changes.
  enum class Cause : std::uint8_t {
    start,     // nobody was in
    lost,      // a member has gone
    silent,    // a member is out for now
    dropped,   // … by an operator's word
    returned,  // who was out for now is back
    joined,    // a replica is in, catching up
    promoted,  // a replica has caught up
    repeated,  // the same members: a connection is made anew, or gradients or states differed
    protocol,  // the same members, who all speak another protocol now
  };
  static constexpr std::size_t kCauses = 9;
  static const char* name(Cause cause);

  // Of a replica, as the page's grid has it.
  static constexpr char kContributes = 'c', kCatchesUp = 'j', kSuspended = 's', kAbsent = '.';

  struct StepRow {
    std::uint64_t step = 0;
    std::optional<Duration> took;  // since the commit before; nothing: not known
    std::uint32_t broken = 0;      // epochs that repeated it
  };
  struct EpochRow {
    std::uint64_t epoch = 0, step = 0;
    Cause cause{};
    std::string reason;
    std::string states;  // of each replica
    std::optional<TimePoint> at;
  };
  struct Failure {
    std::uint64_t epoch = 0, step = 0;
    Cause cause{};
    std::string reason;
    TimePoint at{};
    std::optional<Duration> recovery, cost;  // until the next commit, and what that step took more than usual
  };
  struct NodeReport {
    proto::Report report;
    TimePoint at{};
  };

  // A hop whose gaps are far longer than those of the others, as the daemons' reports have it for a while.
  struct SlowHop {
    std::uint32_t replica = 0, rank = 0, from = 0;  // to which rank, from which replica
    std::uint64_t gap_us = 0, usual_us = 0;         // its longest gap of the last seconds, and the median hop's
    std::uint64_t since_step = 0;
    TimePoint since{}, seen{};
  };

  explicit JobHistory(std::uint32_t replicas) : states_(replicas, kAbsent), out_since_(replicas) {}

  // Decisions, in order. `now`: they have just been made; nothing: earlier, nobody knows when.
  void on_records(const std::vector<proto::LogRecord>& records, std::optional<TimePoint> now);
  // This coordinator decides from now on, where another one, or it before a restart, had stopped.
  void on_lead(TimePoint now);
  // Another one does from now on. `running`: the job is not finished.
  void on_standby(TimePoint now, bool running);
  void on_append(Duration took) { appends_.add(seconds(took)); }
  void on_report(proto::Report report, TimePoint now);
  const std::set<std::string>& twins() const { return twins_; }  // names that two daemons have; for tests

  const std::string& states() const { return states_; }
  const std::deque<StepRow>& steps() const { return steps_; }
  const std::deque<EpochRow>& epochs() const { return epochs_; }
  std::uint64_t epochs_by(Cause cause) const { return by_cause_[static_cast<std::size_t>(cause)]; }
  const Histogram& step_seconds() const { return step_seconds_; }
  const Histogram& recovery_seconds() const { return recovery_seconds_; }
  const Histogram& append_seconds() const { return appends_; }
  const std::optional<Failure>& last_failure() const { return last_failure_; }
  std::optional<TimePoint> last_commit() const { return committed_at_; }
  std::optional<TimePoint> decides_since() const { return decides_since_; }  // this coordinator, if it does
  std::optional<Duration> median_step() const;
  // By which a step is long, or the job stands still: the median, or where none is known a minute.
  Duration usual_step() const { return median_step().value_or(kUsualIfUnknown); }
  std::optional<double> steps_per_second() const;  // of the last steps that took ten seconds, or those that are kept
  std::optional<Duration> median_absence() const;  // of the last 16, until the replica contributed again
  // While this coordinator has decided: the time of the job; that in which it did not get on: what steps that were
  // repeated, or took a second and more than ten usual ones, took beyond the usual. And the seconds of all
  // contributors. None of them falls.
  struct Effective {
    Duration total{}, lost{};
    double replica_seconds = 0;
  };
  Effective effective(TimePoint now, bool running) const;
  // The latest of each daemon that has reported of a replica in the last seconds.
  std::vector<const NodeReport*> reports(TimePoint now) const;
  // Nothing where none has stood out for longer than a gap is reported: one that happened once is no slow hop.
  std::optional<SlowHop> slow_hop(TimePoint now) const;

 private:
  void on_committed(const proto::LogRecord::Committed& committed, std::optional<TimePoint> now);
  void on_epoch(const proto::LogRecord::EpochBegun& begun, std::optional<TimePoint> now);
  void on_snapshot(const proto::LogRecord::Snapshot& snapshot);
  std::string states_of(const auto& members, const auto& suspended) const;
  Cause cause_of(const std::string& next) const;
  void note_absences(const std::string& next, TimePoint now);
  bool is_failure(Cause cause) const;
  void look_for_slow_hop(TimePoint now);
  void look_for_a_twin(const proto::Report& report, TimePoint now);
  std::uint32_t contributors() const;
  void begin_step(TimePoint now);
  double contributed_until(TimePoint now) const;  // seconds, since what is in `effective_`

  std::string states_;
  std::vector<std::optional<TimePoint>> out_since_;
  std::deque<StepRow> steps_;
  std::deque<EpochRow> epochs_;
  std::array<std::uint64_t, kCauses> by_cause_{};
  Histogram step_seconds_{{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500}};
  Histogram recovery_seconds_{{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100}};
  Histogram appends_{{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}};
  std::optional<TimePoint> decides_since_;
  std::optional<TimePoint> committed_at_;  // or since when a step was under way that was the first of all
  TimePoint contributed_at_{};             // until then contributors' seconds of the step under way are counted
  std::optional<TimePoint> lost_at_;       // until the next commit
  std::uint32_t broken_ = 0;               // epochs that repeat the step under way
  std::uint32_t protocol_ = 0;             // of the epoch, as its record has it
  bool dropped_ = false;                   // the next epoch is an operator's word
  std::optional<Failure> last_failure_;
  std::deque<Duration> absences_;
  Effective effective_;
  std::map<std::uint32_t, std::map<std::pair<std::uint64_t, std::string>, NodeReport>> reports_;  // by daemon
  struct Named {  // one of the daemons of a name
    std::uint64_t daemon = 0;
    TimePoint heard{};
    bool other = false;         // another one was heard since
    std::uint32_t returns = 0;  // that it was heard again after another one
  };
  std::map<std::string, Named> daemons_;
  std::set<std::string> twins_;
  std::optional<SlowHop> slow_hop_;
  TimePoint looked_at_{};  // for it
};

}  // namespace rejoin::daemon
