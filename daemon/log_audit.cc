#include "daemon/log_audit.h"

#include <algorithm>
#include <map>

#include "membership/log.h"
#include "membership/rank_set.h"

namespace rejoin::daemon {

using membership::Batch;
using membership::Samples;

namespace {

Samples from(const Batch& batch) {
  Samples samples;
  for (const auto& range : batch) samples.add(range.begin, range.end);
  return samples;
}

// Those of [0, end) that are not among them.
Samples missing(const Samples& samples, std::uint64_t end) {
  Samples all;
  all.add(0, end);
  all.remove(samples);
  return all;
}

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
    if (record.has_snapshot()) begin_from(record.snapshot());
    if (record.has_epoch()) {
      quiet_ = false;
      for (const auto& member : record.epoch().members())
        if (!member.catching_up()) may_be_out_ += batch_;
    }
    if (record.has_rolled_back()) roll_back(record.rolled_back());
    if (record.has_committed()) commit(record.committed());
  }

  std::uint64_t not_trained() const { return missing(trained_, highest_).size(); }
  std::uint64_t samples() const { return highest_; }
  std::uint64_t lost() const { return passed_over_.size(); }

 private:
  void commit(const proto::LogRecord::Committed& committed) {
    std::uint64_t end = 0;
    Samples& step = steps_[committed.step()];
    for (const auto& member : committed.members()) step.add(from(membership::batch_of(member)));
    trained_.add(step);
    passed_over_.remove(step);
    if (!step.empty()) end = step.ranges().back().second;
    if (quiet_ && end > out_before_) passed_over_.add(missing(trained_, end));
    if (!quiet_) out_before_ += may_be_out_;
    out_before_ = std::max(out_before_, end);
    highest_ = std::max(highest_, end);
    may_be_out_ = batch_ * static_cast<std::uint64_t>(committed.members_size());
    quiet_ = true;
  }

  // The log was compacted, and what was in it before that is not here.
  void begin_from(const proto::LogRecord::Snapshot& snapshot) {
    batch_ = snapshot.job().batch();
    trained_ = Samples(snapshot.ledger().trained(), membership::kMostSamples);
    for (const auto& step : snapshot.ledger().steps())
      steps_[step.step()] = Samples(step.trained(), membership::kMostSamples);
    out_before_ = snapshot.ledger().next();
    highest_ = trained_.empty() ? 0 : trained_.ranges().back().second;
  }

  void roll_back(const proto::LogRecord::RolledBack& record) {
    quiet_ = false;
    for (auto step = steps_.upper_bound(record.version()); step != steps_.end(); step = steps_.erase(step))
      trained_.remove(step->second);
    if (record.trained().empty()) return;
    // As a checkpoint says. Its gaps wait to go out, and then what comes behind it.
    steps_.clear();
    passed_over_.clear();
    may_be_out_ = 0;
    trained_ = steps_[record.version()] = Samples(record.trained(), membership::kMostSamples);
    out_before_ = trained_.ranges().back().second;
    highest_ = std::max(highest_, out_before_);
  }

  std::uint64_t batch_ = 0;
  std::map<std::uint64_t, Samples> steps_;
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
    if (record.has_snapshot()) {
      audit.committed = audit.compacted = record.snapshot().committed();
      audit.before_compacted = Samples(record.snapshot().ledger().trained(), membership::kMostSamples).size();
    }
    if (record.has_committed()) audit.committed = record.committed().step();
    if (!record.has_rolled_back()) continue;
    audit.committed = record.rolled_back().version();
    if (record.rolled_back().trained().empty()) continue;
    audit.checkpoint = audit.committed;
    audit.before_checkpoint = Samples(record.rolled_back().trained(), membership::kMostSamples).size();
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
  audit.to_be_trained = reading.not_trained() - audit.lost;
  return audit;
}

}  // namespace rejoin::daemon
