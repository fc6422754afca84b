// The value in the middle of measurements, which a few that are far off do not move.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace rejoin {

// Of at least one value; of two in the middle the lower one.
template <typename T>
T lower_median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace rejoin
