#include "daemon/log_audit.h"

#include <algorithm>
#include <map>

#include "membership/log.h"

namespace rejoin::daemon {

using membership::Batch;
using membership::SampleRange;

namespace {

// A set of samples, in as few ranges as hold it.
class Samples {
 public:
  void add(SampleRange range) {
    auto next = ranges_.upper_bound(range.begin);
    if (next != ranges_.begin() && std::prev(next)->second >= range.begin) --next;
    for (; next != ranges_.end() && next->first <= range.end; next = ranges_.erase(next)) {
      range.begin = std::min(range.begin, next->first);
      range.end = std::max(range.end, next->second);
    }
    if (range.begin < range.end) ranges_[range.begin] = range.end;
  }
  void remove(SampleRange range) {
    auto next = ranges_.upper_bound(range.begin);
    if (next != ranges_.begin() && std::prev(next)->second > range.begin) --next;
    while (next != ranges_.end() && next->first < range.end) {
      const auto [begin, end] = *next;
      next = ranges_.erase(next);
      if (begin < range.begin) ranges_[begin] = range.begin;
      if (end > range.end) ranges_[range.end] = end;
    }
  }
  // Those of [0, end) that it does not have.
  Batch missing(std::uint64_t end) const {
    Batch gaps;
    std::uint64_t at = 0;
    for (auto it = ranges_.begin(); it != ranges_.end() && at < end; at = (it++)->second)
      if (it->first > at) gaps.push_back({at, std::min(it->first, end)});
    if (at < end) gaps.push_back({at, end});
    return gaps;
  }
  const std::map<std::uint64_t, std::uint64_t>& ranges() const { return ranges_; }

 private:
  std::map<std::uint64_t, std::uint64_t> ranges_;  // begin → end
};

// Follows the log, and finds where samples were passed over.
//
// Between two commits of one epoch nobody comes or goes: all that goes out after the first is trained in the second.
// Has that one trained a sample that was never out before, then nothing was left that waited to go out again; so what
// lies before it and is not trained will never be.
//
// Which samples were out before is not written where the replica that held them was lost. But nobody has held more than
// a batch in each epoch and step: that bounds them.
class Reading {
 public:
  void take(const proto::LogRecord& record) {
    if (record.has_job()) batch_ = record.job().batch();
    if (record.has_epoch()) {
      quiet_ = false;
      for (const auto& member : record.epoch().members())
        if (!member.catching_up()) may_be_out_ += batch_;
    }
    if (record.has_rolled_back()) roll_back(record.rolled_back().version());
    if (record.has_committed()) commit(record.committed());
  }

  Batch missing() const { return trained_.missing(highest_); }
  std::uint64_t samples() const { return highest_; }
  std::uint64_t lost() const {
    std::uint64_t lost = 0;
    for (const auto& [begin, end] : passed_over_.ranges()) lost += end - begin;
    return lost;
  }

 private:
  void commit(const proto::LogRecord::Committed& committed) {
    std::uint64_t end = 0;
    Batch& step = steps_[committed.step()];
    for (const auto& member : committed.members())
      for (const auto& range : membership::batch_of(member)) {
        step.push_back(range);
        trained_.add(range);
        passed_over_.remove(range);
        end = std::max(end, range.end);
      }
    if (quiet_ && end > out_before_)
      for (const auto& gap : trained_.missing(end)) passed_over_.add(gap);
    if (!quiet_) out_before_ += may_be_out_;
    out_before_ = std::max(out_before_, end);
    highest_ = std::max(highest_, end);
    may_be_out_ = batch_ * static_cast<std::uint64_t>(committed.members_size());
    quiet_ = true;
  }

  void roll_back(std::uint64_t version) {
    quiet_ = false;
    for (auto step = steps_.upper_bound(version); step != steps_.end(); step = steps_.erase(step))
      for (const auto& range : step->second) trained_.remove(range);
  }

  std::uint64_t batch_ = 0;
  std::map<std::uint64_t, Batch> steps_;
  Samples trained_, passed_over_;
  std::uint64_t highest_ = 0;
  std::uint64_t out_before_ = 0;  // at the last commit: no sample from here on had ever been handed out
  std::uint64_t may_be_out_ = 0;  // since then, at most so many new ones
  bool quiet_ = false;            // nobody has come or gone since the last commit
};

}  // namespace

LogAudit audit_log(const std::vector<proto::LogRecord>& records, std::optional<Step> last_step) {
  LogAudit audit;
  Reading reading;
  for (const auto& record : records) {
    reading.take(record);
    if (record.has_epoch()) ++audit.epochs;
    if (record.has_committed()) audit.committed = record.committed().step();
    if (record.has_rolled_back()) audit.committed = record.rolled_back().version();
  }
  const auto trained = membership::audit(membership::trained_by_step(records));
  audit.once = trained.once;
  audit.repeated = trained.repeated;
  if (last_step &&
      audit.committed >= last_step->value) {  // what only steps that were rolled back had reached is nobody's
    audit.samples = trained.samples;
    audit.lost = trained.lost;
    return audit;
  }
  audit.samples = reading.samples();
  audit.lost = reading.lost();
  audit.to_be_trained = membership::samples_of(reading.missing()) - audit.lost;
  return audit;
}

}  // namespace rejoin::daemon
