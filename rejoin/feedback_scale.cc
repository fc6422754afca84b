#include "rejoin/feedback_scale.h"

#include <algorithm>
#include <utility>

namespace rejoin {

float FeedbackScale::of(std::uint64_t step, float factor) {
  if (const float before = std::exchange(told_, factor); std::exchange(step_, step) != step && before > 0)
    before_[next_++ % before_.size()] = before;
  auto sorted = before_;
  const auto median = sorted.begin() + sorted.size() / 2;
  std::nth_element(sorted.begin(), median, sorted.end());
  return std::min(factor / *median, std::clamp(factor, 1.0f, 2.0f));
}

}  // namespace rejoin
