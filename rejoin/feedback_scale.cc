#include "rejoin/feedback_scale.h"

#include <algorithm>
#include <utility>

#include "base/lower_median.h"

namespace rejoin {

float FeedbackScale::of(std::uint64_t step, float factor) {
  if (const float before = std::exchange(told_, factor); std::exchange(step_, step) != step && before > 0)
    before_[next_++ % before_.size()] = before;
  return std::min(factor / lower_median<float>({before_.begin(), before_.end()}), std::clamp(factor, 1.0f, 2.0f));
}

}  // namespace rejoin
