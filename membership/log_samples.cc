// What a log says of the samples.
#include <numeric>

#include "membership/log.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

namespace {

using Trained = std::map<std::uint64_t, Batch>;

// All that was trained up to the checkpoint stands under its step.
void go_back(Trained& trained, const proto::LogRecord::RolledBack& record) {
  trained.erase(trained.upper_bound(record.version()), trained.end());
  if (record.trained().empty()) return;
  trained.clear();
  for (const auto& range : record.trained()) trained[record.version()].push_back({range.begin(), range.end()});
}

// What a compacted log begins with: what was trained in the steps that are kept one by one, and all else under the last
// step before them.
void begin_from(Trained& trained, const proto::LogRecord::Snapshot& snapshot) {
  Samples rest(snapshot.ledger().trained(), kMostSamples);
  for (const auto& step : snapshot.ledger().steps()) {
    Samples of_step(step.trained(), kMostSamples);
    rest.remove(of_step);
    for (const auto& [begin, end] : of_step.ranges()) trained[step.step()].push_back({begin, end});
  }
  for (const auto& [begin, end] : rest.ranges()) trained[snapshot.ledger().from()].push_back({begin, end});
}

// The batches that were trained, by step. `on_rolled_back` hears of those before and after.
template <typename OnRolledBack>
Trained follow(const std::vector<proto::LogRecord>& records, OnRolledBack on_rolled_back) {
  Trained trained;
  for (const auto& record : records) {
    if (record.has_rolled_back()) {
      const Trained before = trained;
      go_back(trained, record.rolled_back());
      on_rolled_back(record.rolled_back(), before, trained);
    }
    if (record.has_snapshot()) begin_from(trained, record.snapshot());
    if (!record.has_committed()) continue;
    for (const auto& member : record.committed().members())
      for (const auto& range : batch_of(member)) trained[record.committed().step()].push_back(range);
  }
  return trained;
}

}  // namespace

RolledBack rolled_back(const std::vector<proto::LogRecord>& records) {
  RolledBack given_up;
  const auto samples = [](const Trained& trained) {
    return std::accumulate(trained.begin(), trained.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const auto& step) { return sum + samples_of(step.second); });
  };
  (void)follow(records, [&](const auto& record, const Trained& before, const Trained& after) {
    if (record.version() >= record.from()) return;  // it has come from further on
    given_up.steps += record.from() - record.version();
    given_up.samples += samples(before) - std::min(samples(before), samples(after));
  });
  return given_up;
}

std::map<std::uint64_t, Batch> trained_by_step(const std::vector<proto::LogRecord>& records) {
  return follow(records, [](const auto&, const Trained&, const Trained&) {});
}

}  // namespace rejoin::membership
