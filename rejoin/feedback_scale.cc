#include "rejoin/feedback_scale.h"

#include <algorithm>

namespace rejoin {

float FeedbackScale::of(std::uint64_t step, float factor) {
  const std::size_t own = step % told_.size();
  auto others = told_;
  std::rotate(others.begin(), others.begin() + own + 1, others.end());  // this step's is the last
  const auto end = others.end() - 1, middle = others.begin() + (end - others.begin()) / 2;
  std::nth_element(others.begin(), middle, end);
  if (factor > 0) told_[own] = factor;
  return std::min(factor / *middle, std::max(1.0f, factor));
}

}  // namespace rejoin
