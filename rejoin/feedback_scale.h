// How much what coding has lost of a step counts in the next one, from what the trainer tells of its updates.
//
// An update multiplies the mean gradient by a factor. What is lost of a step has been multiplied by this step's, and
// will be by the next one's: so it counts as their quotient. The next one is not known yet, and taken to be as usual:
// the median of the last 15 that were told. Where each step is clipped by about as much, all that is lost is made up
// for; of one that is clipped by far more, as much as has gone into the update.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace rejoin {

class FeedbackScale {
 public:
  FeedbackScale() { before_.fill(1); }
  // `factor`: of this step's update, as in Session::scale_feedback(). Of one step it may be told again. It counts at
  // most once, however small the usual factor was, and up to twice where `factor` is that much: a loss's scale doubles.
  float of(std::uint64_t step, float factor);

 private:
  std::array<float, 15> before_;  // of the steps before; above 0: one that was skipped says nothing of others
  std::size_t next_ = 0;          // of these that is replaced next
  std::uint64_t step_ = 0;
  float told_ = 0;  // of this step
};

}  // namespace rejoin
