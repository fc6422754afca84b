// Recordings of several processes: whose they are, and how they are put on one clock.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/events.h"
#include "daemon/clock_stamp.h"
#include "daemon/recording.h"
#include "daemon/tests/made_up_recording.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;

TEST(ClockStamp, IsReadBehindAnyMessageAndNowhereElse) {
  std::string message = "bytes";
  EXPECT_FALSE(stamp_of(message));
  append(message, {0x1122334455667788, -5}, 1700000000123456);
  const auto stamp = stamp_of(message);
  ASSERT_TRUE(stamp);
  EXPECT_EQ(stamp->clock, 0x1122334455667788u);
  EXPECT_EQ(stamp->sent_ns, -5);
  EXPECT_EQ(system_time_of(message), 1700000000123456);
  EXPECT_FALSE(system_time_of(std::string_view(message).substr(message.size() - 20))) << "an older sender's";
  EXPECT_FALSE(stamp_of(std::string_view(message).substr(0, message.size() - 1)));
  EXPECT_FALSE(stamp_of(message + "x"));
}

TEST(Recordings, ArePutOnTheCoordinatorsClockAndThoseOfOtherJobsLeftOut) {
  MadeUp coordinator("coordinator", 1), node("node1", 2), other("r0.0", 1);
  node.skew = 5'000'000 * ms;
  other.job = 99;
  other.add(1 * ms, events::Kind::step);
  coordinator.add(2 * ms, events::Kind::epoch, {.epoch = 1}, "0\nstart");
  for (std::int64_t i = 1; i < 50; ++i) {
    coordinator.hear(node, i * 100 * ms, i * 100 * ms + 200'000);
    node.hear(coordinator, i * 100 * ms, i * 100 * ms + 100'000);
  }
  node.add(1234 * ms, events::Kind::plan, {.epoch = 2});
  const auto joined = join({coordinator.recording(), node.recording(), other.recording()});
  ASSERT_EQ(joined.all.size(), 2u);
  EXPECT_EQ(joined.job, 7u);
  EXPECT_THAT(joined.notes, testing::ElementsAre(HasSubstr("another job, 0000000000000063")));
  EXPECT_EQ(joined.clocks, 2u);
  EXPECT_LE(joined.clock_error, 700'000) << "half of both ways, and the drift that half of ten seconds may have";
  for (const auto& event : joined.all[1].events)
    if (event.kind == events::Kind::plan) {
      EXPECT_LE(std::abs(event.at - 1234 * ms), joined.clock_error);
    }
}

// Its name is no secret, and who makes it first owns it.
TEST(Recordings, ADefaultDirectoryThatAnotherUserHasMadeIsNotBelieved) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  constexpr uid_t kOtherUser = 1, kUser = 54321;
  const std::string squatted = fmt::format("/dev/shm/rejoin-{}", kUser);
  if (::mkdir(squatted.c_str(), 0755) != 0) GTEST_SKIP() << squatted << ": " << std::strerror(errno);
  EXPECT_EQ(::chown(squatted.c_str(), kOtherUser, kOtherUser), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_user = ::setuid(kUser) == 0;
    const auto read = read_recordings({});
    ::_exit(is_user && !read && read.error().code == ErrorCode::refused ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(::rmdir(squatted.c_str()), 0);
}

}  // namespace
}  // namespace rejoin::daemon
