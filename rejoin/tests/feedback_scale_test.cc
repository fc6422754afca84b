#include "rejoin/feedback_scale.h"

#include <gtest/gtest.h>

#include <limits>

namespace rejoin {
namespace {

struct Scale : testing::Test {
  FeedbackScale scale;
  std::uint64_t step = 0;
  float next(float factor) { return scale.of(++step, factor); }
  void usually(float factor) {
    for (int i = 0; i < 16; ++i) (void)next(factor);
  }
};

TEST_F(Scale, WhatIsNotClippedCountsWhole) {
  for (int i = 0; i < 40; ++i) EXPECT_EQ(next(1), 1.0f);
}

TEST_F(Scale, AStepThatIsClippedByFarMoreThanOthersCountsAsMuchAsItsUpdateHas) {
  EXPECT_EQ(next(1e-15f), 1e-15f) << "the first, too";
  for (const float usual : {1.0f, 0.25f}) {
    usually(usual);
    for (int spike = 0; spike < 7; ++spike) EXPECT_EQ(next(1e-15f), 1e-15f / usual) << "and several in a row";
    EXPECT_EQ(next(usual), 1.0f);
  }
}

TEST_F(Scale, WhereEachStepIsClippedByAboutAsMuchAllCountWhole) {
  usually(0.1f);
  EXPECT_EQ(next(0.1f), 1.0f);
  EXPECT_FLOAT_EQ(next(0.05f), 0.5f);
}

TEST_F(Scale, NoStepCountsMoreThanWholeWhereLaterOnesMayBeClippedLess) {
  usually(1e-3f);
  EXPECT_EQ(next(0.5f), 1.0f);
  usually(std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(next(1), 1.0f);
}

TEST_F(Scale, ALossScaleThatGrowsMakesOfWhatWasLostAsMuchMore) {
  usually(1);
  EXPECT_EQ(next(2), 2.0f);
  EXPECT_EQ(next(1), 1.0f);
}

TEST_F(Scale, AStepThatIsSkippedCountsForNothingAndIsNoUsualOne) {
  usually(0.5f);
  for (int skipped = 0; skipped < 20; ++skipped) EXPECT_EQ(next(0), 0.0f);
  EXPECT_EQ(next(0.5f), 1.0f);
}

TEST_F(Scale, AFactorThatIsAlwaysLargeIsUsualSoonAndCountsLittleUntilThen) {
  for (int i = 0; i < 8; ++i) EXPECT_LE(next(65536), 2.0f);
  EXPECT_EQ(next(65536), 1.0f);
}

TEST_F(Scale, WhatIsToldOfSomeStepsAloneIsLearntAllTheSame) {
  for (int i = 0; i < 16; ++i) (void)scale.of(step += 2, 0.1f);
  EXPECT_EQ(scale.of(step += 2, 0.1f), 1.0f);
}

TEST_F(Scale, AStepOfWhichIsToldAgainIsOneStep) {
  usually(1);
  for (int again = 0; again < 20; ++again) EXPECT_EQ(scale.of(100, 0.5f), 0.5f);
}

}  // namespace
}  // namespace rejoin
