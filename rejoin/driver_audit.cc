// What the driver tells the coordinator for its audits: digests of results and state, and what is behind them.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "base/events.h"
#include "rejoin/driver.h"

namespace rejoin {

template <typename T>
struct Driver::Offloaded {
  std::atomic<bool> ended = false;
  Result<T> result;  // once it has
};

template <typename T>
std::shared_ptr<Driver::Offloaded<T>> Driver::offload(std::function<Result<T>()> work) {
  auto under_way = std::make_shared<Offloaded<T>>();
  auto run = [under_way, work = std::move(work)] {
    under_way->result = work();
    under_way->ended.store(true, std::memory_order_release);
  };
  if (config_.aside) config_.aside(std::move(run));
  else run();
  return under_way;
}

// Whether the digests of this reduction are there, where any are wanted. The state is at the version before the step:
// the trainer has handed over all gradients and changes nothing before the commit, which waits for this report.
bool Driver::audited() {
  const auto& plan = machine_.plan();
  if (!plan.has_audit()) {
    digests_ = {};
    return true;
  }
  const auto is_of_this = [&] { return audit_epoch_ == machine_.epoch() && audit_step_ == machine_.step(); };
  // One of an epoch that has ended is waited for, and thrown away: what it reads may have changed meanwhile.
  if (audit_under_way_ && !is_of_this() && audit_under_way_->ended.load(std::memory_order_acquire))
    audit_under_way_.reset();
  if (!audit_under_way_) {
    audit_epoch_ = machine_.epoch();
    audit_step_ = machine_.step();
    audit_under_way_ = offload<membership::RankDigests>(
        [results = ring_->results(), &audit = *audit_, contributes = machine_.contributes(),
         period = plan.audit().period(), phase = plan.audit().phase()]() -> Result<membership::RankDigests> {
          const auto reduced = results.digest(audit.access());
          if (!reduced) return tl::unexpected(reduced.error());
          if (!contributes) return membership::RankDigests{.reduced = *reduced};
          const auto state = audit.digest(period, phase);
          if (!state) return tl::unexpected(state.error());
          return membership::RankDigests{.reduced = *reduced, .state = *state};
        });
  }
  if (!is_of_this() || !audit_under_way_->ended.load(std::memory_order_acquire)) return false;
  const auto audit = std::exchange(audit_under_way_, nullptr);
  if (!audit->result) fail(audit->result.error());
  else digests_ = *audit->result;
  return !failure_;
}

void Driver::report_reduced() {
  if (!machine_.member() || machine_.reduced() || ring_->epoch() != machine_.epoch()) return;
  if (!std::all_of(done_.begin(), done_.end(), [](bool d) { return d; })) return;
  if (!audited()) return;
  machine_.on_reduced();
  proto::FromNode report;
  auto& reduced = *report.mutable_reduced();
  reduced.set_replica(config_.replica.value);
  reduced.set_epoch(machine_.epoch().value);
  reduced.set_step(machine_.step().value);
  membership::RankSet(config_.rank).to(reduced.mutable_ranks());
  if (computed_.step == machine_.step().value && computed_.took && !computed_.paused)
    reduced.set_compute_us(static_cast<std::uint64_t>(*computed_.took / std::chrono::microseconds(1)));
  if (machine_.plan().has_audit()) {
    reduced.add_results(digests_.reduced);
    reduced.add_state(digests_.state);
  }
  events::record(events::Kind::reduced, {.epoch = machine_.epoch().value, .step = machine_.step().value});
  reports_.push_back(std::move(report));
}

// Where this plan asks what is behind the digests of the epoch that it ends. This rank reduces nothing in the next one
// until that is known, so outputs and state stay as they are.
void Driver::inspect_if_asked(const proto::Plan& plan) {
  const auto& wanted = plan.inspect();
  if (inspection_ || !plan.has_inspect() || !ring_ || wanted.rank() != config_.rank ||
      wanted.epoch() != ring_->epoch().value || !machine_.reduced() || !machine_.plan().has_audit() ||
      plan.epoch() <= machine_.epoch().value || plan.committed() >= machine_.step().value)
    return;
  inspection_ = offload<proto::FromNode>(details());
  take_details();
}

void Driver::take_details() {
  if (!inspection_ || !inspection_->ended.load(std::memory_order_acquire)) return;
  const auto inspection = std::exchange(inspection_, nullptr);
  if (!inspection->result) fail(inspection->result.error());
  else reports_.push_back(*inspection->result);
}

// Digests of a GPU's memory take as long as its other work lets them, and only this process can tell the others so.
// When they have taken all patience there is, its driver may never return: then the coordinator is to judge, who knows
// whether anybody else has the state. Those of an epoch that has ended may have ended long before audited() looks.
void Driver::excuse_digests(TimePoint now) {
  const bool under_way = inspection_ || (audit_under_way_ && !audit_under_way_->ended.load(std::memory_order_acquire));
  digests_since_ = !under_way ? TimePoint{} : digests_since_ == TimePoint{} ? now : digests_since_;
  const Duration taken = now - digests_since_;
  if (!under_way || taken < silence_ / 4 || now - excused_at_ < silence_ / 8) return;
  const bool may = taken <= config_.patience;
  excuse(fmt::format("the digests of an audit on {}, for {:.1f} s", owner_.device()->name(), seconds(taken)), may,
         digests_since_, now)
      .set_only_waiting(may);
}

std::function<Result<proto::FromNode>()> Driver::details() const {
  return [origins = ring_->origins(), &audit = *audit_, contributes = machine_.contributes(),
          wanted = machine_.plan().audit(), epoch = ring_->epoch(), replica = config_.replica,
          rank = config_.rank]() -> Result<proto::FromNode> {
    const auto results = origins.digests(audit.access());
    if (!results) return tl::unexpected(results.error());
    proto::FromNode report;
    auto& details = *report.mutable_details();
    details.set_replica(replica.value);
    details.set_rank(rank);
    details.set_epoch(epoch.value);
    for (const auto& segments : *results) {
      auto& bucket = *details.add_buckets();
      for (const auto& segment : segments) {
        auto& one = *bucket.add_segments();
        one.set_digest(segment.digest);
        one.set_from(segment.from.value);
      }
    }
    if (!contributes) return report;
    const auto range_digests = audit.range_digests(wanted.period(), wanted.phase());
    if (!range_digests) return tl::unexpected(range_digests.error());
    for (const auto& range_digest : *range_digests) {
      auto& one = *details.add_state();
      one.set_tensor(range_digest.tensor);
      one.set_first(range_digest.first);
      one.set_count(range_digest.count);
      one.set_digest(range_digest.digest);
    }
    return report;
  };
}

}  // namespace rejoin
