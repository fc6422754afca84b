// Sessions' state and streams on a GPU: one made of software here, a real one in `./run gpu test`.
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "device/copier.h"
#include "device/tests/reducer_peer.h"
#include "rejoin/kernel_launcher.h"
#include "rejoin/tests/streams.h"
#include "rejoin/watchdog.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;

TEST_F(Streams, ABucketIsReadyWhenItsStreamComesThere) {
  hold();
  ASSERT_TRUE(order->hand_over(2, 7, stream->handle()));
  EXPECT_TRUE(order->poll().empty());
  let_go();
  const auto reached = next();
  ASSERT_EQ(reached.size(), 1u);
  EXPECT_EQ(reached[0].bucket, 2u);
  EXPECT_EQ(reached[0].step, 7u);
}

TEST_F(Streams, LaterWorkWaitsForTheReductionOfThisStepAndBucket) {
  ASSERT_TRUE(order->hand_over(1, 5, stream->handle()));
  const auto behind = *stream->mark();
  EXPECT_EQ(next().size(), 1u);
  order->on_reduced(0, 5);
  order->on_reduced(1, 4);
  EXPECT_TRUE(order->streams_wait());
  EXPECT_LT(*stream->reached(), behind);
  order->on_reduced(1, 5);
  EXPECT_FALSE(order->streams_wait());
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(*stream->reached(), behind);
}

// It may sleep for long where no stream was to come anywhere.
TEST_F(Streams, WhoPollsIsWokenForTheFirstThatIsToComeAndPollsForTheOthers) {
  hold();
  for (std::uint32_t b = 0; b < 3; ++b) ASSERT_TRUE(order->hand_over(b, 1, stream->handle()));
  EXPECT_EQ(woken, 1);
  let_go();
  for (std::uint32_t b = 0; b < 3; ++b) {
    EXPECT_EQ(next().size(), 1u);
    order->on_reduced(b, 1);
  }
  ASSERT_TRUE(order->updated(1, true, stream->handle()));
  EXPECT_EQ(woken, 2);
  EXPECT_EQ(next().size(), 1u);
  EXPECT_FALSE(order->waits_for_streams());
}

// As with NCCL: buckets of one stream, each waiting for the one before, end all.
TEST_F(Streams, BucketsOfOneStreamAreReadyOneAfterTheOther) {
  for (std::uint32_t b = 0; b < 3; ++b) ASSERT_TRUE(order->hand_over(b, 1, stream->handle()));
  ASSERT_TRUE(order->updated(1, true, stream->handle()));
  for (std::uint32_t b = 0; b < 3; ++b) {
    const auto reached = next();
    ASSERT_EQ(reached.size(), 1u);
    EXPECT_EQ(reached[0].bucket, b);
    order->on_reduced(b, 1);
  }
  const auto updated = next();
  ASSERT_EQ(updated.size(), 1u);
  EXPECT_FALSE(updated[0].bucket);
  EXPECT_TRUE(updated[0].contributed);
}

TEST_F(Streams, AFailedSessionLetsThemGoOn) {
  ASSERT_TRUE(order->hand_over(0, 9, stream->handle()));
  order->release();
  order->on_reduced(0, 3);  // who was late changes nothing
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(order->hand_over(1, 9, stream->handle()).error().code, ErrorCode::cancelled);
}

// The kernel would be in the graph, and not on the device.
TEST_F(Streams, OneThatIsBeingCapturedIsRefused) {
  if (fake.begin_capture == nullptr) GTEST_SKIP() << "a real driver is not told to capture here";
  EXPECT_TRUE(order->takes(stream->handle()));
  fake.begin_capture(stream->handle());
  EXPECT_EQ(order->takes(stream->handle()).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(order->updated(1, true, stream->handle()).error().code, ErrorCode::invalid_argument);
  EXPECT_TRUE(fake.end_capture(stream->handle()));
  EXPECT_FALSE(order->waits_for_streams());
}

TEST_F(Streams, AStreamMayEndBeforeItsSession) {
  ASSERT_TRUE(order->hand_over(0, 9, stream->handle()));
  order->on_reduced(0, 9);
  stream.reset();
  order.reset();
}

TEST(KernelLauncher, WorksAreDoneThoughOnlyTheLauncherLaunches) {
  const auto device = device::test_gpu();
  std::shared_ptr<device::Reducer> reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms, .external_launcher = true});
  auto from = *device->allocate_pinned(1000), to = *device->allocate_pinned(1000);
  KernelLauncher launcher(reducer);
  ASSERT_TRUE(launcher.start());
  for (int round = 1; round <= 20; ++round) {
    std::fill(from.bytes.begin(), from.bytes.end(), std::byte(round));
    const auto given = *reducer->copy(to.bytes.data() + 1, from.bytes.data(), 999);
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (*reducer->done() < given) {
      (void)reducer->wants_launch();
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    }
    EXPECT_EQ(to.bytes[999], std::byte(round));
    if (round % 3 == 0) reducer->rest();
  }
}

// As where an endpoint is closed: nobody calls the launcher meanwhile.
TEST(KernelLauncher, WhoWaitsForItsCopiesIsServed) {
  const auto device = device::test_gpu();
  std::shared_ptr<device::Reducer> reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  auto from = *device->allocate_pinned(1000), to = *device->allocate_pinned(1000);
  KernelLauncher launcher(reducer);
  ASSERT_TRUE(launcher.start());
  const auto copier = device::make_copier(reducer);
  std::fill(from.bytes.begin(), from.bytes.end(), std::byte{7});
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(copier->copy(to.bytes.data() + 10 * i, from.bytes.data(), 10));
  ASSERT_TRUE(copier->finish());
  EXPECT_TRUE(std::equal(from.bytes.begin(), from.bytes.end(), to.bytes.begin()));
}

TEST(KernelLauncher, AHeldKernelStaysAndLeavesWhenItIsLetGo) {
  const auto device = device::test_gpu();
  auto reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms, .external_launcher = true});
  ASSERT_TRUE(reducer->hold());
  ASSERT_TRUE(reducer->hold());
  const auto launches = reducer->launches();
  reducer->rest();
  reducer->let_go();
  EXPECT_FALSE(device::ReducerPeer::resting(*reducer));
  auto from = *device->allocate_pinned(64), to = *device->allocate_pinned(64);
  const auto given = *reducer->copy(to.bytes.data(), from.bytes.data(), 64);
  while (*reducer->done() < given) EXPECT_FALSE(reducer->wants_launch());
  EXPECT_EQ(reducer->launches(), launches);
  reducer->let_go();
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (!device::ReducerPeer::resting(*reducer)) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
}

struct Alarm {
  std::mutex mutex;
  std::condition_variable changed;
  bool raised = false;
  void raise() {
    const std::lock_guard lock(mutex);
    raised = true;
    changed.notify_all();
  }
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, limit, [&] { return raised; });
  }
};

TEST(AWatchdog, RaisesTheAlarmWhenWhatMattersStandsStill) {
  Alarm alarm;
  Watchdog watchdog(
      32ms, [] { return true; }, [&] { alarm.raise(); });
  ASSERT_TRUE(watchdog.start());
  EXPECT_TRUE(alarm.wait(20s));
}

TEST(AWatchdog, IsQuietWhereNothingMatters) {
  Alarm alarm;
  std::atomic<int> asked = 0;
  Watchdog watchdog(
      32ms, [&] { return ++asked, false; }, [&] { alarm.raise(); });
  ASSERT_TRUE(watchdog.start());
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (asked < 100) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_FALSE(alarm.wait(0ms));
}

}  // namespace
}  // namespace rejoin
