#include "daemon/log_audit.h"

#include <algorithm>

namespace rejoin::daemon {

using membership::Samples;

namespace {

// Those of [0, end) that are not among them.
Samples missing(const Samples& samples, std::uint64_t end) {
  Samples all;
  all.add(0, end);
  all.remove(samples);
  return all;
}

}  // namespace

void PassedOver::take(const proto::LogRecord& record) {
  if (record.has_job()) take(record.job());
  if (record.has_snapshot()) begin_from(record.snapshot());
  if (record.has_epoch()) {
    quiet_ = false;
    std::uint64_t contributors = 0;
    for (const auto& member : record.epoch().members()) {
      if (member.catching_up()) continue;
      ++contributors;
      hold_.insert(member.replica());
    }
    may_be_out_ += dealt_to(contributors);
  }
  if (record.has_rolled_back()) roll_back(record.rolled_back());
  if (record.has_committed()) commit(record.committed());
}

void PassedOver::take(const proto::LogRecord::Job& job) {
  together_ = job.constant_batch() ? job.replicas() * job.batch() : 0;
  batch_ = job.constant_batch() ? together_ : job.batch();
  unit_ = job.ranks();
}

// At most, in a step.
std::uint64_t PassedOver::dealt_to(std::uint64_t contributors) const {
  return together_ > 0 ? together_ + unit_ * contributors : batch_ * contributors;
}

std::uint64_t PassedOver::not_trained() const { return missing(trained_, highest_).size(); }

void PassedOver::commit(const proto::LogRecord::Committed& committed) {
  may_be_left_over_ = not_trained() - lost();
  for (const auto& member : committed.members()) hold_.erase(member.replica());
  may_be_left_over_ += (batch_ * at_most_ + 999) / 1000 * hold_.size() + (at_most_ > 1000 ? unit_ * hold_.size() : 0);
  at_most_ = std::max<std::uint64_t>(at_most_, committed.balance().at_most());
  hold_.clear();
  for (const auto& member : committed.members()) hold_.insert(member.replica());
  std::uint64_t end = 0;
  Samples& step = steps_[committed.step()];
  for (const auto& member : committed.members()) membership::add(step, membership::batch_of(member));
  trained_.add(step);
  passed_over_.remove(step);
  if (!step.empty()) end = step.ranges().back().second;
  if (quiet_ && end > out_before_) passed_over_.add(missing(trained_, end));
  if (!quiet_) out_before_ += may_be_out_;
  out_before_ = std::max(out_before_, end);
  highest_ = std::max(highest_, end);
  may_be_out_ = dealt_to(static_cast<std::uint64_t>(committed.members_size()));
  quiet_ = true;
  if (steps_.size() > kept_) steps_.erase(steps_.begin());
}

// The log was compacted, and what was in it before that is not here.
void PassedOver::begin_from(const proto::LogRecord::Snapshot& snapshot) {
  take(snapshot.job());
  trained_ = Samples(snapshot.ledger().trained(), membership::kMostSamples);
  for (const auto& step : snapshot.ledger().steps())
    steps_[step.step()] = Samples(step.trained(), membership::kMostSamples);
  for (const auto& held : snapshot.ledger().held()) hold_.insert(held.replica());
  at_most_ = std::max<std::uint64_t>(
      {at_most_, snapshot.ledger().balance().at_most(), snapshot.ledger().next_balance().at_most()});
  out_before_ = snapshot.ledger().next();
  highest_ = trained_.empty() ? 0 : trained_.ranges().back().second;
}

void PassedOver::roll_back(const proto::LogRecord::RolledBack& record) {
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

void LogAuditor::take(const proto::LogRecord& record) {
  passed_over_.take(record);
  trained_.take(record);
  if (record.has_epoch()) ++audit_.epochs;
  if (record.has_snapshot()) {
    audit_.committed = audit_.compacted = record.snapshot().committed();
    audit_.epochs = record.snapshot().epoch();  // they are numbered from 1 on
    audit_.before_compacted = Samples(record.snapshot().ledger().trained(), membership::kMostSamples).size();
  }
  if (record.has_committed()) audit_.committed = record.committed().step();
  if (!record.has_rolled_back()) return;
  audit_.committed = record.rolled_back().version();
  if (record.rolled_back().trained().empty()) return;
  audit_.checkpoint = audit_.committed;
  audit_.before_checkpoint = Samples(record.rolled_back().trained(), membership::kMostSamples).size();
}

LogAudit LogAuditor::result(std::optional<Step> last_step) const {
  LogAudit audit = audit_;
  const auto trained = membership::audit(trained_.by_step());
  audit.once = trained.once;
  audit.repeated = trained.repeated;
  // What only steps that were rolled back had reached is nobody's.
  if (last_step && audit.committed >= last_step->value) {
    audit.samples = trained.samples;
    const std::uint64_t passed_over = std::min(trained.lost, passed_over_.lost());
    audit.left_over = std::min(trained.lost - passed_over, passed_over_.may_be_left_over());
    audit.lost = trained.lost - audit.left_over;
    return audit;
  }
  audit.samples = passed_over_.samples();
  audit.lost = passed_over_.lost();
  audit.to_be_trained = passed_over_.not_trained() - audit.lost;
  return audit;
}

}  // namespace rejoin::daemon
