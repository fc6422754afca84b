#include "rejoin/step.h"

#include <cmath>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin {

namespace {

Session::Step::Batch batch_of(const membership::Batch& ranges) {
  Session::Step::Batch batch;
  for (const auto& range : ranges) batch.push_back({range.begin, range.end});
  return batch;
}

}  // namespace

Result<std::optional<Session::Step>> step_of(StepView view, bool weighted) {
  if (view.shares_batch && !weighted)
    return fail(ErrorCode::refused,
                "the job has --constant-batch or --balance-batches, so that replicas train different numbers of "
                "samples, and this trainer does not weigh its gradients by them: multiply them with Step::weight(), "
                "and say so by use_weights()");
  Session::Step::Facts facts{.number = view.step,
                             .contributes = view.contributes,
                             .leads = view.leads,
                             .contributors = view.contributors,
                             .batch = batch_of(view.batch),
                             .weight = view.weight,
                             .epoch = view.epoch,
                             .settled = view.settled};
  for (auto& [replica, card] : view.cards) facts.cards.push_back({replica.value, std::move(card)});
  facts.upcoming = [ahead = std::move(view.ahead)](std::uint32_t steps) {
    std::vector<Session::Step::Batch> batches;
    for (const auto& one : ahead.batches(steps)) batches.push_back(batch_of(one));
    return batches;
  };
  return Session::Step(std::move(facts));
}

Result<> check_restored(const Position& position, std::uint64_t digest) {
  if (!position.digest() || *position.digest() == digest) return {};
  return fail(ErrorCode::mismatch,
              "the state that was restored is not the one that this position of step {} was taken with: its digest is "
              "{:016x}, and should be {:016x}. Restore all weights and moments of this rank, bit for bit, out of the "
              "checkpoint that the position was saved with; where they are meant to differ, give join() the position "
              "without_digest()",
              position.step(), digest, *position.digest());
}

std::vector<Update> updates_of(const std::vector<catchup::Update>& updates) {
  std::vector<Update> calls;
  calls.reserve(updates.size());
  for (const auto& one : updates)
    calls.push_back({TensorId{one.tensor}, one.first, one.count, one.step.value, one.gradient, one.contributors});
  return calls;
}

Error broken_update(const SessionConfig& config, std::uint64_t step, const char* who_did, const std::string& what) {
  return {ErrorCode::cancelled,
          fmt::format("{} in the update of step {}: {}. The state of replica {} rank {} is updated in part, or not at "
                      "all, and of no use: this session is at its end. Start the process again, and it catches up",
                      who_did, step, what, config.replica, config.rank)};
}

Error forgotten_buckets(std::uint64_t step, const std::string& missing) {
  return {ErrorCode::invalid_argument,
          fmt::format("commit() of step {} without {}: all_reduce() is due for each bucket "
                      "in a step that this replica contributes to",
                      step, missing)};
}

Error of_no_one_step() {
  return {ErrorCode::unavailable,
          "position() of a state that is of no one step: this replica has not begun one, catches up, or is within "
          "commit(); take the checkpoint between steps, on a replica whose step contributes()"};
}

bool tell_of_over(const Position& from, const proto::Plan& plan) {
  membership::Samples its;
  for (const auto& [begin, end] : from.trained()) its.add(begin, end);
  const bool is_of_last =
      from.step() == plan.committed() && its == membership::Samples(plan.trained(), membership::kMostSamples);
  if (is_of_last)
    logger().info(
        "the job was finished with step {} before this replica had a part in it: it came with the state of that step",
        plan.committed());
  else
    logger().warn("the job was finished with step {} before this replica had a part in it: its state is not the job's",
                  plan.committed());
  return is_of_last;
}

void tell_of_end(bool contributes, const proto::Plan& plan) {
  if (contributes) return;
  logger().warn("the job was finished with step {} before this replica had caught up: its state is not the job's",
                plan.committed());
}

Position position_after(std::uint64_t step, const membership::Samples& trained) {
  std::vector<SampleRange> ranges;
  for (const auto& [begin, end] : trained.ranges()) ranges.push_back({begin, end});
  return {step, std::move(ranges), std::nullopt};
}

Result<> check_factor(std::uint64_t step, float factor) {
  if (std::isfinite(factor) && factor >= 0) return {};
  return fail(ErrorCode::invalid_argument, "scale_feedback() of step {} with {}: a factor is finite, and 0 or above",
              step, factor);
}

}  // namespace rejoin
