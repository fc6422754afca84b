// Sessions' state and streams on a GPU: one made of software here, a real one in `./run gpu test`.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "base/digest.h"
#include "device/copier.h"
#include "device/digester.h"
#include "device/remote.h"
#include "device/tests/library.h"
#include "rejoin/kernel_launcher.h"
#include "rejoin/stream_order.h"
#include "rejoin/training_state.h"
#include "rejoin/watchdog.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;

// A session's order of streams, the reducer whose kernel it keeps on the device, and a stream of the trainer's.
struct Streams : testing::Test {
  std::shared_ptr<device::Device> device = device::test_gpu();
  std::shared_ptr<device::Reducer> reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  std::unique_ptr<device::Stream> stream = *device->make_stream();
  device::Memory flag = *device->allocate_pinned(64);  // what the stream is held up with
  std::unique_ptr<StreamOrder> order = *StreamOrder::make(device, reducer, 300);

  ~Streams() override {  // also of a test that has failed in the middle
    let_go();
    if (order) order->release();
  }
  std::uint64_t& held() { return *reinterpret_cast<std::uint64_t*>(flag.bytes.data()); }
  void hold() {
    held() = 0;
    ASSERT_TRUE(stream->wait_until(&held(), 1));
  }
  void let_go() { std::atomic_ref(held()).store(1); }
  // What is reached next.
  std::vector<StreamOrder::Reached> next() {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    for (;;) {
      auto reached = order->poll();
      if (!reached.empty()) return reached;
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "no stream has come anywhere";
        return {};
      }
      std::this_thread::yield();
    }
  }
};

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

TEST_F(Streams, AStreamMayEndBeforeItsSession) {
  ASSERT_TRUE(order->hand_over(0, 9, stream->handle()));
  order->on_reduced(0, 9);
  stream.reset();
  order.reset();
}

// What a trainer may do behind a bucket, on the same stream or for the whole device, while the progress thread reduces
// it: additions and copies by the reducer, no call of the driver. On a GPU each of these hangs for ever where there is
// one; the software driver ends the program then.
struct Behind : Streams {
  static constexpr std::size_t kCount = 50'000;
  device::Memory a = *device->allocate(kCount * 4), b = *device->allocate(kCount * 4);
  device::Memory pinned = *device->allocate_pinned(kCount * 4), out = *device->allocate_pinned(kCount * 4);
  std::uint64_t step = 0;

  Behind() {
    EXPECT_TRUE(stream->clear(b.bytes.data(), b.bytes.size()));
    EXPECT_TRUE(stream->synchronize());
    std::fill_n(reinterpret_cast<float*>(pinned.bytes.data()), kCount, 1.5f);
  }
  // As the progress thread would: what was staged comes in, is added, and goes out.
  void reduce() {
    finish(reducer->copy(a.bytes.data(), pinned.bytes.data(), kCount * 4));
    finish(reducer->add(DataType::float32, b.bytes.data(), a.bytes.data(), b.bytes.data(), kCount, 0));
    finish(reducer->copy(out.bytes.data(), b.bytes.data(), kCount * 4));
  }
  void finish(const Result<std::uint64_t>& given) {
    ASSERT_TRUE(given) << given.error().message;
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    for (auto done = reducer->done(); done && *done < *given; done = reducer->done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the kernel is not there";
      std::this_thread::yield();
    }
  }
  // Hands over `buckets`, then does this, while another thread reduces them.
  void hand_over_and(std::uint32_t buckets, const std::function<void()>& what) {
    ++step;
    for (std::uint32_t i = 0; i < buckets; ++i) ASSERT_TRUE(order->hand_over(i, step, stream->handle()));
    std::thread progress([&] {
      for (std::uint32_t i = 0; i < buckets;)
        for (const auto& reached : next()) {
          reduce();
          order->on_reduced(*reached.bucket, step);
          ++i;
        }
    });
    what();
    progress.join();
    ASSERT_TRUE(stream->synchronize());
    EXPECT_FALSE(order->streams_wait());
  }
};

TEST_F(Behind, TheLossIsRead) {
  for (int i = 1; i <= 20; ++i) {
    float loss = 0;  // pageable
    hand_over_and(1, [&] {
      ASSERT_TRUE(stream->copy(reinterpret_cast<std::byte*>(&loss), b.bytes.data(), sizeof loss));
      ASSERT_TRUE(stream->synchronize());
    });
    EXPECT_EQ(loss, 1.5f * static_cast<float>(i));  // and it was reduced before
  }
}

TEST_F(Behind, ManyBytesGoToPageableMemoryAndBack) {
  Bytes pageable(64 * MiB);
  auto much = *device->allocate(pageable.size());
  hand_over_and(1, [&] {
    ASSERT_TRUE(stream->copy(much.bytes.data(), pageable.data(), pageable.size()));
    ASSERT_TRUE(stream->copy(pageable.data(), much.bytes.data(), pageable.size()));
  });
}

TEST_F(Behind, MoreIsQueuedThanAStreamHolds) {
  hand_over_and(1, [&] {
    for (int i = 0; i < 5000; ++i) ASSERT_TRUE(stream->clear(a.bytes.data() + kCount * 4 - 4, 4));
  });
}

TEST_F(Behind, MemoryIsFreed) {
  auto gone = *device->allocate(1 * MiB);
  hand_over_and(1, [&] { gone = {}; });
}

TEST_F(Behind, TwoHundredBucketsAreReducedOneAfterTheOther) {
  hand_over_and(200, [&] { ASSERT_TRUE(stream->synchronize()); });
}

TEST_F(Behind, EventsAndHostFunctionsOfOthersAreQueued) {
  const Fd eventfd = *make_eventfd();
  auto side = *device->make_stream();
  hand_over_and(1, [&] {
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(side->follow(*stream));
      ASSERT_TRUE(side->signal(eventfd));
    }
  });
  ASSERT_TRUE(side->synchronize());
}

TEST_F(Behind, AKernelIsLaunchedForTheFirstTime) {
  auto digester = *device::Digester::make(*device);
  hand_over_and(1, [&] {
    const std::span<const std::byte> whole[] = {pinned.bytes.first(0)};
    ASSERT_TRUE(digester->digests(whole));
  });
}

// By a thread that may stand in the driver, since nobody here waits for it.
TEST_F(Behind, ADaemonIsServedMemory) {
  auto state = *device->allocate(1 * MiB);
  auto server = *device::MemoryServer::make(device, {state.bytes});
  std::atomic<bool> stop = false;
  std::uint64_t rounds = 0;
  std::thread daemon([&] {
    const auto remote = *device::connect_remote(*server->next(), device->address());
    const auto access = *remote->make_access();
    const device::Handle handle{.kind = device::Handle::Kind::address,
                                .size = state.bytes.size(),
                                .address = reinterpret_cast<std::uint64_t>(state.bytes.data())};
    const auto there = remote->import_shared({&handle, 1})->bytes;
    Bytes bytes(state.bytes.size()), back(state.bytes.size());
    while (!stop) {
      std::fill(bytes.begin(), bytes.end(), std::byte(++rounds));
      ASSERT_TRUE(access->write(there.data(), bytes));
      EXPECT_EQ((*access->digests(std::vector{BytesView(there)}))[0], digest(bytes));
      ASSERT_TRUE(access->read(there, back.data()));
      ASSERT_EQ(back, bytes);
    }
  });
  for (int i = 0; i < 20; ++i) {
    float loss = 0;
    hand_over_and(1, [&] {
      ASSERT_TRUE(stream->copy(reinterpret_cast<std::byte*>(&loss), b.bytes.data(), sizeof loss));
      auto gone = *device->allocate(1 * MiB);
      gone = {};
    });
  }
  stop = true;
  daemon.join();
  EXPECT_GT(rounds, 0u);
}

// The software driver finds what a GPU can only hang at.
TEST_F(Behind, AnyOtherThreadsCallOfTheDriverEndsTheProgram) {
  if (device::is_real()) GTEST_SKIP() << "a real driver would hang, or not";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        auto mine = *device->make_stream();
        (void)order->hand_over(0, 1, stream->handle());
        std::thread([&] { (void)mine->mark(); }).join();
      },
      "cuEventRecord while a stream waits for a flag");
}

TEST(KernelLauncher, WorksAreDoneThoughOnlyTheLauncherLaunches) {
  const auto device = device::test_gpu();
  std::shared_ptr<device::Reducer> reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms, .external_launcher = true});
  auto from = *device->allocate_pinned(1000), to = *device->allocate_pinned(1000);
  KernelLauncher launcher(reducer);
  for (int round = 1; round <= 20; ++round) {
    std::fill(from.bytes.begin(), from.bytes.end(), std::byte(round));
    const auto given = *reducer->copy(to.bytes.data() + 1, from.bytes.data(), 999);
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (*reducer->done() < given) {
      if (reducer->wants_launch()) launcher.call();
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
  EXPECT_FALSE(*reducer->resting());
  auto from = *device->allocate_pinned(64), to = *device->allocate_pinned(64);
  const auto given = *reducer->copy(to.bytes.data(), from.bytes.data(), 64);
  while (*reducer->done() < given) EXPECT_FALSE(reducer->wants_launch());
  EXPECT_EQ(reducer->launches(), launches);
  reducer->let_go();
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (!*reducer->resting()) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
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
  EXPECT_TRUE(alarm.wait(20s));
}

TEST(AWatchdog, IsQuietWhereNothingMatters) {
  Alarm alarm;
  std::atomic<int> asked = 0;
  Watchdog watchdog(
      32ms, [&] { return ++asked, false; }, [&] { alarm.raise(); });
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (asked < 100) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_FALSE(alarm.wait(0ms));
}

}  // namespace
}  // namespace rejoin
