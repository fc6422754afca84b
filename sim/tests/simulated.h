// What the tests of the simulated cluster share.
#pragma once

#include <gtest/gtest.h>

#include "base/log.h"
#include "sim/world.h"

namespace rejoin::sim {

struct Quiet : testing::Test {
  void SetUp() override { init_logging("sim", "off"); }
};

// That no invariant was broken; otherwise which, and by what.
inline testing::AssertionResult holds(const Outcome& outcome) {
  if (!outcome.violation) return testing::AssertionSuccess();
  return testing::AssertionFailure() << outcome.violation->invariant << ": " << outcome.violation->what;
}

}  // namespace rejoin::sim
