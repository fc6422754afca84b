// What a trainer is told of a step, made of what the driver knows; and what it tells of one.
#pragma once

#include <new>

#include "catchup/gradient_log.h"
#include "rejoin/driver.h"
#include "rejoin/session.h"

namespace rejoin {

// Errors: `refused`, for a trainer that is not `weighted` where its gradients would have to be.
Result<std::optional<Session::Step>> step_of(StepView view, bool weighted);
// Of the state after it, without a digest.
Position position_after(std::uint64_t step, const membership::Samples& trained);
// Says that the job was finished before this replica had a part in it, and returns whether the state that it came with
// is that of the last step, as far as step and samples say.
bool tell_of_over(const Position& from, const proto::Plan& plan);
// Says to a replica that has been in the job until its last step, and does not contribute then, that it has not caught
// up.
void tell_of_end(bool contributes, const proto::Plan& plan);
// Errors: `mismatch`, where a state of this digest is not the position's.
Result<> check_restored(const Position& position, std::uint64_t digest);
// The optimizer's calls.
std::vector<Update> updates_of(const std::vector<catchup::Update>& updates);
// Of an optimizer that has not come to the end of this step's update.
Error broken_update(const SessionConfig& config, std::uint64_t step, const char* who_did, const std::string& what);
// Does a part of this step's update. Errors: the part's; a broken update where there is no memory for it.
template <typename Part>
auto with_memory(const SessionConfig& config, std::uint64_t step, const Part& part) -> decltype(part()) {
  try {
    return part();
  } catch (const std::bad_alloc& error) {
    return tl::unexpected(broken_update(config, step, "memory ran out", error.what()));
  }
}
// Of a commit() of this step, in which the buckets with these names have not been handed over.
Error forgotten_buckets(std::uint64_t step, const std::string& missing);
// Of position().
Error of_no_one_step();
// Errors: `invalid_argument`, for what scale_feedback() does not take.
Result<> check_factor(std::uint64_t step, float factor);

}  // namespace rejoin
