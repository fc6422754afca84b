// Elements of all types, for tests of the kernels' arithmetic.
#pragma once

#include <cstddef>
#include <cstring>

#include "base/arithmetic.h"

namespace rejoin::device {

// An element's value as a double.
inline double value_of(DataType type, const std::byte* at) {
  double value = 0;
  arithmetic::dispatch(type, [&](auto element) {
    typename decltype(element)::Storage stored;
    std::memcpy(&stored, at, sizeof stored);
    value = static_cast<double>(element.load(stored));
  });
  return value;
}

}  // namespace rejoin::device
