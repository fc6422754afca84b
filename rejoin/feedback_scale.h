// How much what coding has lost of a step counts in the next one, from what the trainer tells of its updates.
//
// An update multiplies the mean gradient by a factor. What is lost of a step has been multiplied by this step's, and
// will be by the next one's: so it counts as their quotient. The next one is not known yet, and taken to be as usual:
// the median of the last 15. Where each step is clipped by about as much, all that is lost is made up for; of one that
// is clipped by far more, as much as has gone into the update.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace rejoin {

class FeedbackScale {
 public:
  FeedbackScale() { told_.fill(1); }
  // `factor`: of this step's update, as in Session::scale_feedback(). Of one step it may be told again. Never more than
  // 1, or the factor where that is more, however small the usual one was.
  float of(std::uint64_t step, float factor);

 private:
  std::array<float, 16> told_;  // by step; above 0: a step that was skipped says nothing of others
};

}  // namespace rejoin
