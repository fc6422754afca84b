// What the driver does while streams wait for buckets: one made of software here, a real one in `./run gpu test`.
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <string_view>

#include "base/digest.h"
#include "device/access.h"
#include "device/digester.h"
#include "device/remote.h"
#include "rejoin/tests/streams.h"

namespace rejoin {
namespace {

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

// So many that the driver has no room for them, and lets nobody launch.
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

// Making one launches the digests' kernel. A real driver has loaded it where another test of this process has.
TEST_F(Behind, AKernelIsLaunchedForTheFirstTime) {
  const auto waits = [&] { return device::is_real() ? 0 : fake.counters().waits_for_device.load(); };
  if (!device::is_real()) fake.forget_kernels();
  const auto before = waits();
  std::uint64_t digested = 0;
  hand_over_and(1, [&] {
    auto digester = *device::Digester::make(*device);
    const std::span<const std::byte> whole[] = {pinned.bytes};
    digested = (*digester->digests(whole))[0];
  });
  EXPECT_EQ(digested, digest(pinned.bytes));
  EXPECT_TRUE(device::is_real() || waits() > before);
}

TEST_F(Behind, ADigesterIsMadeWithItsKernelLoaded) {
  if (device::is_real()) GTEST_SKIP() << "a real driver does not say what it waits for";
  fake.forget_kernels();
  auto digester = *device::Digester::make(*device);
  const auto before = fake.counters().waits_for_device.load();
  const std::span<const std::byte> whole[] = {pinned.bytes};
  ASSERT_TRUE(digester->digests(whole));
  EXPECT_EQ(fake.counters().waits_for_device, before);
}

// Another thread of the trainer's that frees memory, over and over.
class Freeing {
 public:
  explicit Freeing(device::Device& device)
      : thread_([this, &device] {
          if (!device::is_real()) device::fake::Control(device::cuda_library().c_str()).hands_over();
          while (!stop_) {
            auto gone = *device.allocate(4096);
            gone = {};
          }
        }) {}
  ~Freeing() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST_F(Behind, AnotherThreadFreesMemoryAllTheTime) {
  const Freeing freeing(*device);
  for (int i = 0; i < 50 && !HasFailure(); ++i) hand_over_and(1 + i % 3, [] {});
  EXPECT_TRUE(stream->synchronize());
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

// At each call that a hand-over makes, another thread of the trainer's begins to free memory, and stands in that until
// all that is queued is done.
struct Pauses {
  std::thread::id handing_over;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t wanted = 0, begun = 0;
  bool stop = false, missed = false;  // a free that did not begin in time
  static Pauses*& the() {
    static Pauses* the = nullptr;
    return the;
  }
  static void on_call(const char* call) {
    Pauses& p = *the();
    std::unique_lock lock(p.mutex);
    if (call == std::string_view(device::fake::kWaitsForDevice)) {
      if (std::this_thread::get_id() != p.handing_over) p.begun = p.wanted;
      p.changed.notify_all();
    } else if (std::this_thread::get_id() == p.handing_over) {
      const auto mine = ++p.wanted;
      p.changed.notify_all();
      // A second free waits for the first, whose wait has begun before.
      p.missed |= !p.changed.wait_for(lock, std::chrono::seconds(20), [&] { return p.begun >= mine; });
    }
  }
};

TEST_F(Behind, AnotherThreadFreesMemoryBetweenAnyTwoCallsOfAHandOver) {
  if (device::is_real()) GTEST_SKIP() << "a real driver calls nobody back";
  Pauses pauses;
  Pauses::the() = &pauses;
  std::thread frees([&] {
    fake.hands_over();
    for (std::uint64_t seen = 0;;) {
      {
        std::unique_lock lock(pauses.mutex);
        pauses.changed.wait(lock, [&] { return pauses.stop || pauses.wanted > seen; });
        if (pauses.stop) return;
        seen = pauses.wanted;
      }
      auto gone = *device->allocate(4096);
      gone = {};
    }
  });
  for (int i = 0; i < 10 && !HasFailure(); ++i) {
    ++step;
    std::thread progress([&] {
      for (std::uint32_t reduced = 0; reduced < 2 && !HasFailure();)
        for (const auto& reached : next()) {
          order->on_reduced(*reached.bucket, step);
          ++reduced;
        }
    });
    pauses.handing_over = std::this_thread::get_id();
    fake.set_hook(&Pauses::on_call);
    for (std::uint32_t bucket = 0; bucket < 2; ++bucket)
      EXPECT_TRUE(order->hand_over(bucket, step, stream->handle()) || HasFailure());
    fake.set_hook(nullptr);
    progress.join();
  }
  {
    const std::lock_guard lock(pauses.mutex);
    pauses.stop = true;
  }
  pauses.changed.notify_all();
  frees.join();
  EXPECT_TRUE(stream->synchronize());
  EXPECT_FALSE(pauses.missed) << "nobody freed memory there";
  EXPECT_GE(pauses.begun, 10u);
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
      "cuEvent.* while a stream waits for a flag");
}

TEST_F(Behind, WhatServesMemoryMayCallButNotWaitForTheDevice) {
  if (device::is_real()) GTEST_SKIP() << "a real driver would hang, or not";
  fake.count_only(true);
  auto mine = *device->make_stream();
  auto gone = *device->allocate(4096);
  std::uint64_t of_calls = 0, of_waits = 0;
  const auto refused = [&, before = fake.counters().refused.load()] { return fake.counters().refused - before; };
  hand_over_and(1, [&] {
    std::thread([&] {
      (void)::pthread_setname_np(::pthread_self(), "rejoin-memory");
      (void)mine->mark();
      of_calls = refused();
      gone = {};
      of_waits = refused();
    }).join();
  });
  fake.count_only(false);
  EXPECT_EQ(of_calls, 0u);
  EXPECT_EQ(of_waits, 1u);
}

}  // namespace
}  // namespace rejoin
