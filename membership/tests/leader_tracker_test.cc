// Whom a node with several addresses follows.
#include "membership/leader_tracker.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

proto::ToNode welcomes() {
  proto::ToNode message;
  message.mutable_welcome()->set_oldest(1);
  message.mutable_welcome()->set_newest(16);
  return message;
}

struct OfTwo : testing::Test {
  LeaderTracker tracker{"node", 1s, 2, [](proto::LeaderView&) {}};
  TimePoint now{10s};
  bool warned = false;
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until;) {
      now += 50ms;
      for (std::size_t from = 0; from < 2; ++from) (void)tracker.on_message(from, {}, now);
      for (const auto& note : tracker.on_tick(now).notes) warned = warned || note.warning;
    }
  }
};

TEST_F(OfTwo, WhoGreetsAndDoesNotSayWhetherItLeadsDecidesAlone) {
  (void)tracker.on_connected(0, now);
  (void)tracker.on_message(0, welcomes(), now);
  pass(100ms);
  EXPECT_FALSE(tracker.decides_alone()) << "it may be about to say so";
  pass(1s);
  EXPECT_EQ(tracker.decides_alone(), 0u);
  pass(1s);
  EXPECT_TRUE(warned) << "trainers wait";
  (void)tracker.on_disconnected(0, now);
  EXPECT_FALSE(tracker.decides_alone());
}

TEST_F(OfTwo, WhoSaysThatItDoesNotLeadIsOneOfSeveral) {
  (void)tracker.on_connected(1, now);
  (void)tracker.on_message(1, welcomes(), now);
  proto::ToNode stands_by;
  stands_by.mutable_leads()->set_term(3);
  (void)tracker.on_message(1, stands_by, now);
  pass(2s);
  EXPECT_FALSE(tracker.decides_alone());
  EXPECT_TRUE(warned) << "nobody leads";
}

}  // namespace
}  // namespace rejoin::membership
