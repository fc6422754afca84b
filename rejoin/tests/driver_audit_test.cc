// What a rank's driver says of the digests of an audit, which are taken beside it and may take long.
#include "rejoin/tests/lone_driver.h"

namespace rejoin {
namespace {

struct Audited {
  std::vector<std::function<void()>> aside;
  Alone rank{{}, {}, 64, kSilence, {}, [this](std::function<void()> task) { aside.push_back(std::move(task)); }};

  // Alone in epoch 1, it has reduced its step and takes the digests.
  Audited() {
    rank.register_it();
    rank.plan_with_peers(0, 1, false, true);
    rank.driver->take(1, rank.now);
    rank.driver->want({true}, rank.now);
    for (int i = 0; i < 5; ++i) rank.pass(1ms);
    EXPECT_EQ(aside.size(), 1u);
    EXPECT_FALSE(rank.driver->machine().reduced());
  }
  // How often it says that its step waits for digests.
  int excuses(Duration time) {
    int times = 0;
    for (const TimePoint until = rank.now + time; rank.now < until;) {
      rank.pass(kSilence / 16);
      for (const auto& report : rank.driver->take_reports())
        if (report.has_accusation()) times += report.accusation().what().find("digests") != std::string::npos;
    }
    return times;
  }
};

TEST(DriverAudit, DigestsThatTakeLongAreToldOf) {
  Audited of;
  EXPECT_GT(of.excuses(kSilence), 0);
  for (const auto& task : std::exchange(of.aside, {})) task();
  EXPECT_EQ(of.excuses(kSilence), 0);
  EXPECT_TRUE(of.rank.driver->machine().reduced());
}

// Of whom the step waits for then nobody would be put out, and at last the one that only waits.
TEST(DriverAudit, DigestsThatAnEpochHasOvertakenExcuseNothingOnceTheyHaveEnded) {
  Audited of;
  of.rank.plan_with_peers(1, 2, false, true);  // one that is not there yet
  EXPECT_GT(of.excuses(kSilence), 0) << "they are under way, and keep the GPU from the step";
  for (const auto& task : std::exchange(of.aside, {})) task();
  EXPECT_EQ(of.excuses(4 * kSilence), 0);
}

}  // namespace
}  // namespace rejoin
