#include "bench/job_times.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace rejoin::bench {

namespace {

using events::Kind;

// When things happened in one step of one trainer.
struct Moments {
  std::int64_t begun = 0, computed = 0, bucket_begun = 0, bucket_done = 0, reduced = 0, committed = 0, updated = 0;
  std::uint64_t epoch = 0;
  bool again = false;  // something of it happened twice
  bool whole() const {
    return begun != 0 && computed != 0 && bucket_begun != 0 && bucket_done != 0 && reduced != 0 && committed != 0 &&
           updated != 0 && !again;
  }
};

std::map<std::uint64_t, Moments> moments_of(const daemon::Recording& trainer) {
  std::map<std::uint64_t, Moments> all;
  for (const auto& event : trainer.events) {
    const auto at = [&](std::int64_t Moments::*when) {
      auto& step = all[event.numbers.step];
      step.again = step.again || step.*when != 0;
      step.*when = event.at;
    };
    switch (event.kind) {
      case Kind::step: at(&Moments::begun); break;
      case Kind::computed: at(&Moments::computed); break;
      case Kind::bucket_begun: at(&Moments::bucket_begun); break;
      case Kind::bucket_done: at(&Moments::bucket_done), all[event.numbers.step].epoch = event.numbers.epoch; break;
      case Kind::reduced: at(&Moments::reduced); break;
      case Kind::committed: at(&Moments::committed); break;
      case Kind::updated: at(&Moments::updated); break;
      default: break;
    }
  }
  return all;
}

// When the decision of each step began to be written, and had been synced.
struct Written {
  std::int64_t begun = 0, ended = 0;
};

std::map<std::uint64_t, Written> written_by(const daemon::Recording& coordinator) {
  std::map<std::uint64_t, Written> all;
  Written last;
  for (const auto& event : coordinator.events) {
    if (event.kind == Kind::appended) last = {event.at - static_cast<std::int64_t>(event.numbers.a), event.at};
    if (event.kind == Kind::commit) all[event.numbers.step] = last;
  }
  return all;
}

}  // namespace

Distribution::Distribution(std::vector<double> values) : sorted_(std::move(values)) {
  std::sort(sorted_.begin(), sorted_.end());
}

double Distribution::mean() const {
  return sorted_.empty() ? 0
                         : std::accumulate(sorted_.begin(), sorted_.end(), 0.0) / static_cast<double>(sorted_.size());
}

double Distribution::at(double share) const {
  if (sorted_.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted_.size())));
  return sorted_[std::clamp<std::size_t>(rank, 1, sorted_.size()) - 1];
}

Steps steps_of(const std::vector<daemon::Recording>& trainers, const daemon::Recording& coordinator,
               std::uint64_t first, std::uint64_t end) {
  const auto written = written_by(coordinator);
  std::vector<std::map<std::uint64_t, Moments>> ranks;
  for (const auto& trainer : trainers) ranks.push_back(moments_of(trainer));
  Steps steps;
  for (std::uint64_t step = first; step < end; ++step) {
    const auto decided = written.find(step);
    if (decided == written.end() || decided->second.begun == 0) continue;
    std::int64_t all_begun = 0, all_reduced = 0;
    bool whole = true;
    for (const auto& rank : ranks) {
      const auto here = rank.find(step), next = rank.find(step + 1);
      whole = whole && here != rank.end() && next != rank.end() && here->second.whole() && next->second.begun != 0 &&
              here->second.epoch == ranks.front().at(step).epoch;
      if (!whole) break;
      all_begun = std::max(all_begun, here->second.bucket_begun);
      all_reduced = std::max(all_reduced, here->second.reduced);
    }
    if (!whole) continue;
    for (const auto& rank : ranks) {
      const Moments& at = rank.at(step);
      const std::int64_t moments[] = {at.begun,
                                      at.computed,
                                      at.bucket_begun,
                                      all_begun,
                                      at.bucket_done,
                                      at.reduced,
                                      all_reduced,
                                      decided->second.begun,
                                      decided->second.ended,
                                      at.committed,
                                      at.updated,
                                      rank.at(step + 1).begun};
      static_assert(std::size(moments) == kParts.size() + 1);
      for (std::size_t part = 0; part < kParts.size(); ++part)
        steps.parts[part].push_back(static_cast<double>(moments[part + 1] - moments[part]) * 1e-3);
      steps.whole.push_back(static_cast<double>(rank.at(step + 1).begun - at.begun) * 1e-3);
    }
  }
  return steps;
}

GoingOn going_on(const daemon::Recording& survivor, TimePoint since) {
  GoingOn going;
  const std::int64_t from = since.time_since_epoch().count();
  std::uint64_t epoch = 0;
  for (const auto& event : survivor.events) {
    if (event.at < from) continue;
    const auto after = static_cast<double>(event.at - from);
    if (event.kind == Kind::enter_epoch && !going.epoch) going.epoch = after, epoch = event.numbers.epoch;
    if (!going.epoch || event.numbers.epoch < epoch) continue;
    if (event.kind == Kind::bucket_done && !going.all_reduce) going.all_reduce = after;
    if (event.kind == Kind::committed && !going.commit) going.commit = after;
  }
  return going;
}

}  // namespace rejoin::bench
