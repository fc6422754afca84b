// What a log says of the samples.
#include <algorithm>
#include <numeric>

#include "membership/log.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

namespace {

// In their order, neighbours as one. What two of them have in common stays in both.
void sort_and_join(Batch& batch) {
  std::sort(batch.begin(), batch.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Batch joined;
  for (const auto& range : batch) append(joined, range);
  batch = std::move(joined);
}

}  // namespace

void TrainedSteps::take(const proto::LogRecord& record) {
  if (record.has_rolled_back()) go_back(record.rolled_back());
  if (record.has_snapshot()) begin_from(record.snapshot());
  if (!record.has_committed()) return;
  Batch& of_step = by_step_[record.committed().step()];
  for (const auto& member : record.committed().members())
    for (const auto& range : batch_of(member)) of_step.push_back(range);
  sort_and_join(of_step);
  if (by_step_.size() - 1 <= kept_) return;
  auto oldest = by_step_.extract(by_step_.begin());
  Batch& next = by_step_.begin()->second;
  next.insert(next.end(), oldest.mapped().begin(), oldest.mapped().end());
  sort_and_join(next);
}

// All that was trained up to a checkpoint stands under its step.
void TrainedSteps::go_back(const proto::LogRecord::RolledBack& record) {
  const std::uint64_t before = samples();
  by_step_.erase(by_step_.upper_bound(record.version()), by_step_.end());
  if (!record.trained().empty()) {
    by_step_.clear();
    for (const auto& range : record.trained()) by_step_[record.version()].push_back({range.begin(), range.end()});
  }
  if (record.version() >= record.from()) return;  // it has come from further on
  rolled_back_.steps += record.from() - record.version();
  rolled_back_.samples += before - std::min(before, samples());
}

// What a compacted log begins with: what was trained in the steps that are kept one by one, and all else under the last
// step before them.
void TrainedSteps::begin_from(const proto::LogRecord::Snapshot& snapshot) {
  rolled_back_.steps = rolled_back_.before = snapshot.steps_rolled_back();
  Samples rest(snapshot.ledger().trained(), kMostSamples);
  for (const auto& step : snapshot.ledger().steps()) {
    const Samples of_step(step.trained(), kMostSamples);
    rest.remove(of_step);
    for (const auto& [begin, end] : of_step.ranges()) by_step_[step.step()].push_back({begin, end});
  }
  for (const auto& [begin, end] : rest.ranges()) by_step_[snapshot.ledger().from()].push_back({begin, end});
}

std::uint64_t TrainedSteps::samples() const {
  return std::accumulate(by_step_.begin(), by_step_.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const auto& step) { return sum + samples_of(step.second); });
}

RolledBack rolled_back(const std::vector<proto::LogRecord>& records) {
  TrainedSteps steps;
  for (const auto& record : records) steps.take(record);
  return steps.rolled_back();
}

std::map<std::uint64_t, Batch> trained_by_step(const std::vector<proto::LogRecord>& records) {
  TrainedSteps steps;
  for (const auto& record : records) steps.take(record);
  return steps.by_step();
}

}  // namespace rejoin::membership
