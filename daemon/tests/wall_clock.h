// The system's clock as this program and its libraries see it, which can be set back. What others of the machine see
// stays as it is.
#pragma once

#include <chrono>

namespace rejoin::test {

// From now on, for as long as this lives.
class ClockSetBack {
 public:
  explicit ClockSetBack(std::chrono::seconds by);
  ~ClockSetBack();
};

}  // namespace rejoin::test
