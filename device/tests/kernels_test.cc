// The kernels' arithmetic and digests, through the seam: on a GPU (`./run gpu test`), or their same source run by the
// CUDA driver made of software.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>

#include "base/arithmetic.h"
#include "base/digest.h"
#include "base/sanitized.h"
#include "device/digester.h"
#include "device/kernels/mailbox.h"
#include "device/reducer.h"
#include "device/tests/elements.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "device/tests/reducer_peer.h"

namespace rejoin::device {
namespace {

using namespace std::chrono_literals;

// A random element.
void put_random(DataType type, std::byte* at, std::mt19937_64& random) {
  arithmetic::dispatch(type, [&](auto element) {
    using Value = typename decltype(element)::Value;
    const auto stored = [&] {
      if constexpr (std::is_integral_v<Value>) return static_cast<Value>(static_cast<std::int64_t>(random()) >> 34);
      else return element.store(static_cast<Value>(std::uniform_real_distribution(-8.0, 8.0)(random)));
    }();
    std::memcpy(at, &stored, sizeof stored);
  });
}
// How far a result of that size may be from the exact one: half a unit in the last place, and for a mean one more
// rounding of the reciprocal and the product.
double tolerance(DataType type, double exact, std::uint32_t divisor) {
  const int digits = type == DataType::float64    ? 53
                     : type == DataType::float32  ? 24
                     : type == DataType::bfloat16 ? 8
                     : type == DataType::float16  ? 11
                                                  : 0;
  if (digits == 0) return divisor > 1 ? 1.0 : 0.0;  // integers are divided towards zero
  return std::ldexp(std::max(std::abs(exact), 6e-5), -digits) * (divisor > 1 ? 4 : 1) + std::abs(exact) * 0x1p-23 * 2;
}

struct Kernels : testing::Test {
  std::shared_ptr<Device> device = test_gpu();
  std::unique_ptr<Stream> stream = *device->make_stream();
  void in(std::byte* to, std::span<const std::byte> from) {
    auto pinned = *device->allocate_pinned(std::max<std::size_t>(from.size(), 1));
    std::copy(from.begin(), from.end(), pinned.bytes.begin());
    ASSERT_TRUE(stream->copy(to, pinned.bytes.data(), from.size()));
    ASSERT_TRUE(stream->synchronize());
  }
  Bytes out(const std::byte* from, std::size_t size) {
    auto pinned = *device->allocate_pinned(std::max<std::size_t>(size, 1));
    EXPECT_TRUE(stream->copy(pinned.bytes.data(), from, size));
    EXPECT_TRUE(stream->synchronize());
    return {pinned.bytes.begin(), pinned.bytes.begin() + static_cast<std::ptrdiff_t>(size)};
  }
  template <typename Is>
  static void wait_until(Is is) {
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    while (!is()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      pause();
    }
  }
  static void finish(Reducer& reducer) {
    wait_until([&] {
      const auto done = reducer.done();
      EXPECT_TRUE(done) << done.error().message;
      return !done || reducer.idle();
    });
  }
};

// Every type, sums and means, sizes around the borders of vectors and tiles, pointers at any element, and nothing but
// the result is written.
TEST_F(Kernels, SumsAndMeansAreRightForEveryTypeSizeAndAlignment) {
  auto reducer = *Reducer::make(*device, {.blocks = 3, .threads = 64});
  constexpr std::size_t room = 70000 * 8 + 64;
  auto a = *device->allocate(room), b = *device->allocate(room), o = *device->allocate(room);
  std::mt19937_64 random(7);
  for (const auto type : kDataTypes) {
    const std::size_t size = size_of(type);
    for (const std::size_t count : {1, 2, 3, 7, 16, 31, 257, 1000, 4099, kSanitized ? 8191 : 69997})
      for (const auto& [at_a, at_b, at_o] : {std::tuple{0, 0, 0}, {1, 1, 1}, {3, 2, 1}})
        for (const std::uint32_t divisor : {0u, 3u}) {
          Bytes x(count * size), y(count * size);
          for (std::size_t i = 0; i < count; ++i)
            put_random(type, &x[i * size], random), put_random(type, &y[i * size], random);
          const std::size_t from_a = at_a * size, from_b = at_b * size, to = at_o * size;
          in(a.bytes.data() + from_a, x);
          in(b.bytes.data() + from_b, y);
          in(o.bytes.data(), Bytes(to + count * size + 64, std::byte{0xa5}));
          ASSERT_TRUE(reducer->add(type, o.bytes.data() + to, a.bytes.data() + from_a, b.bytes.data() + from_b, count,
                                   divisor));
          finish(*reducer);
          const Bytes z = out(o.bytes.data(), to + count * size + 64);
          for (std::size_t i = 0; i < z.size(); ++i)
            if (i < to || i >= to + count * size)
              ASSERT_EQ(z[i], std::byte{0xa5}) << to_string(type) << " wrote byte " << i;
          for (std::size_t i = 0; i < count; ++i) {
            const double exact = (value_of(type, &x[i * size]) + value_of(type, &y[i * size])) / std::max(divisor, 1u);
            ASSERT_NEAR(value_of(type, &z[to + i * size]), exact, tolerance(type, exact, divisor))
                << to_string(type) << " " << i << " of " << count << " divided by " << divisor;
          }
        }
  }
}

// More than the mailbox holds, while the kernel leaves for want of work time and again.
TEST_F(Kernels, WorkGoesOnThroughAnyNumberOfLaunches) {
  auto reducer = *Reducer::make(*device, {.blocks = 4, .threads = 64, .patience = 1ms});
  constexpr std::size_t count = 5000, pieces = 200;
  auto sums = *device->allocate(pieces * count * 4), one = *device->allocate(count * 4);
  in(sums.bytes.data(), Bytes(pieces * count * 4));
  const std::vector<float> ones(count, 1.0f);
  in(one.bytes.data(), std::as_bytes(std::span(ones)));
  std::uint64_t given = 0;
  std::vector<double> expected(pieces);
  for (const std::size_t burst : {1, 200, 3, 64, 65, 130}) {
    for (std::size_t i = 0; i < burst; ++i) {
      std::byte* sum = sums.bytes.data() + i * count * 4;
      EXPECT_EQ(*reducer->add(DataType::float32, sum, sum, one.bytes.data(), count, 0), ++given);
      expected[i] += 1;
    }
    finish(*reducer);
    if (burst % 2 == 0) reducer->rest();
    // Longer than its patience.
    const auto until = std::chrono::steady_clock::now() + 3ms;
    while (std::chrono::steady_clock::now() < until) pause();
  }
  const Bytes result = out(sums.bytes.data(), pieces * count * 4);
  for (std::size_t i = 0; i < pieces * count; ++i)
    ASSERT_EQ(value_of(DataType::float32, &result[i * 4]), expected[i / count]) << i;
  EXPECT_GT(reducer->launches(), 3u);
}

// Each is done before the next is given, so that a place in the mailbox is used again before anybody has asked.
TEST_F(Kernels, WhatIsDoneBeforeAnybodyAsksIsNotForgotten) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms});
  constexpr std::uint32_t works = kernels::Mailbox::kWorks + 8;
  auto memory = *device->allocate(4096);
  Bytes zeros(2048), ones(2048);
  for (std::size_t i = 0; i < ones.size(); i += 4) ones[i] = std::byte{1};
  in(memory.bytes.data(), zeros);
  in(memory.bytes.data() + 2048, ones);
  for (std::uint32_t given = 1; given <= works; ++given) {
    auto* sum = memory.bytes.data();
    ASSERT_EQ(*reducer->add(DataType::int32, sum, sum, sum + 2048, 512, 0), given);
    wait_until([&] { return ReducerPeer::resting(*reducer); });
  }
  finish(*reducer);
  EXPECT_EQ(*reducer->done(), works);
  EXPECT_EQ(value_of(DataType::int32, out(memory.bytes.data() + 2044, 4).data()), works);
}

// Whoever waits for the whole device waits for no member of a ring: the kernel leaves by itself.
TEST_F(Kernels, AKernelWithoutWorkLeaves) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 5ms});
  auto memory = *device->allocate(4096);
  in(memory.bytes.data(), Bytes(4096));
  ASSERT_TRUE(
      reducer->add(DataType::int32, memory.bytes.data(), memory.bytes.data(), memory.bytes.data() + 2048, 512, 0));
  finish(*reducer);
  wait_until([&] { return ReducerPeer::resting(*reducer); });
}

TEST_F(Kernels, AKernelThatIsToldToLeavesWhateverItsPatience) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1h});
  auto memory = *device->allocate(4096);
  in(memory.bytes.data(), Bytes(4096));
  ASSERT_TRUE(
      reducer->add(DataType::int32, memory.bytes.data(), memory.bytes.data(), memory.bytes.data() + 2048, 512, 0));
  finish(*reducer);
  EXPECT_FALSE(ReducerPeer::resting(*reducer));
  reducer->rest();
  wait_until([&] { return ReducerPeer::resting(*reducer); });
}

TEST_F(Kernels, CopiesAndSumsEndInTheOrderGiven) {
  auto reducer = *Reducer::make(*device, {});
  constexpr std::size_t size = 1 * MiB;
  auto a = *device->allocate(size), b = *device->allocate(size);
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 >> 4);
  in(a.bytes.data(), bytes);
  ASSERT_EQ(*reducer->copy(b.bytes.data(), a.bytes.data(), size), 1u);
  finish(*reducer);
  EXPECT_EQ(*reducer->done(), 1u);
  EXPECT_EQ(out(b.bytes.data(), size), bytes);
}

// Between the device and pinned memory both ways, at any distance.
TEST_F(Kernels, CopiesAreRightWhereverTheirEndsLie) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64});
  constexpr std::size_t room = 300000;
  auto memory = *device->allocate(room), here = *device->allocate_pinned(room), back = *device->allocate_pinned(room);
  std::mt19937_64 random(11);
  for (const std::size_t size : {1, 3, 16, 4095, 4096, 70001, 262144})
    for (const auto& [from, over, to] : {std::tuple{0, 0, 0}, {5, 21, 5}, {0, 4, 8}, {1, 2, 3}}) {
      for (auto& byte : here.bytes) byte = static_cast<std::byte>(random());
      std::fill(back.bytes.begin(), back.bytes.end(), std::byte{0xa5});
      ASSERT_TRUE(reducer->copy(memory.bytes.data() + over, here.bytes.data() + from, size));
      finish(*reducer);
      ASSERT_TRUE(reducer->copy(back.bytes.data() + to, memory.bytes.data() + over, size));
      finish(*reducer);
      for (std::size_t i = 0; i < room; ++i) {
        const std::size_t at = i - static_cast<std::size_t>(to);  // wraps before it
        ASSERT_EQ(back.bytes[i], at < size ? here.bytes[static_cast<std::size_t>(from) + at] : std::byte{0xa5})
            << i << " of " << size << ": " << from << " to " << over << " to " << to;
      }
    }
}

// One launch, at the first hold, serves all works until the last is let go, however long it has nothing to do.
TEST_F(Kernels, AKernelThatIsHeldStaysAndNobodyLaunchesAnother) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms});
  auto memory = *device->allocate(4096);
  in(memory.bytes.data(), Bytes(4096));
  const auto add = [&] {
    ASSERT_TRUE(
        reducer->add(DataType::int32, memory.bytes.data(), memory.bytes.data(), memory.bytes.data() + 2048, 512, 0));
    finish(*reducer);
  };
  ASSERT_TRUE(reducer->hold());
  ASSERT_TRUE(reducer->hold());
  const auto first = reducer->launches();
  for (int i = 0; i < 5; ++i) {
    add();
    if (i == 1) reducer->rest();
    if (i == 2) reducer->let_go();
    const auto until = std::chrono::steady_clock::now() + 5ms;  // longer than its patience
    while (std::chrono::steady_clock::now() < until) pause();
  }
  EXPECT_EQ(reducer->launches(), first);
  reducer->let_go();
  wait_until([&] { return ReducerPeer::resting(*reducer); });
  add();
  EXPECT_EQ(reducer->launches(), first + 1);
}

// Holds by one thread, works and launches by another, whichever comes first, time and again.
TEST_F(Kernels, HoldsComeAndGoWhileWorksAreGiven) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .patience = 1ms, .external_launcher = true});
  auto memory = *device->allocate(4096);
  in(memory.bytes.data(), Bytes(4096));
  std::jthread holder([&](std::stop_token over) {
    while (!over.stop_requested()) {
      EXPECT_TRUE(reducer->hold());
      std::this_thread::yield();
      reducer->let_go();
      std::this_thread::yield();
    }
  });
  constexpr int works = 60;
  for (int i = 0; i < works && !HasFailure(); ++i) {
    EXPECT_TRUE(
        reducer->add(DataType::int32, memory.bytes.data(), memory.bytes.data(), memory.bytes.data() + 2048, 512, 0));
    wait_until([&] {
      if (reducer->wants_launch()) EXPECT_TRUE(reducer->launch_if_wanted());
      const auto done = reducer->done();
      EXPECT_TRUE(done);
      return !done || reducer->idle();
    });
    if (i % 3 == 0) reducer->rest();
  }
}

TEST_F(Kernels, OneWithALauncherIsLaunchedByThatAlone) {
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  auto memory = *device->allocate(4096);
  EXPECT_FALSE(reducer->wants_launch());
  ASSERT_TRUE(reducer->copy(memory.bytes.data(), memory.bytes.data() + 2048, 1024));
  EXPECT_TRUE(reducer->wants_launch());
  const auto before = reducer->launches();
  ASSERT_TRUE(reducer->launch_if_wanted());
  EXPECT_EQ(reducer->launches(), before + 1);
  finish(*reducer);
  ASSERT_TRUE(reducer->launch_if_wanted());
  EXPECT_FALSE(reducer->wants_launch());
  reducer->rest();
}

// As with an assertion that fails in one of the trainer's kernels: nobody else would ever say so.
TEST_F(Kernels, WhoeverLaunchesSeesThatAKernelThatIsHeldHasDied) {
  const fake::Control fake{cuda_library().c_str()};
  if (fake.set_options == nullptr) GTEST_SKIP() << "the context of a real driver stays dead";
  auto reducer = *Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  auto memory = *device->allocate(4096);
  ASSERT_TRUE(reducer->hold());
  ASSERT_TRUE(reducer->launch_if_wanted());
  fake.set_options({.dead = true});
  const auto given = reducer->copy(memory.bytes.data(), memory.bytes.data() + 2048, 1024);
  const auto looked = reducer->launch_if_wanted();
  const auto done = reducer->done();
  reducer->let_go();
  reducer.reset();
  fake.set_options({});
  EXPECT_TRUE(given);
  EXPECT_FALSE(looked);
  ASSERT_FALSE(done);
  EXPECT_NE(done.error().message.find("CUDA error 700"), std::string::npos) << done.error().message;
}

TEST_F(Kernels, GridsThatCantBeAreRefused) {
  for (const auto& options :
       {ReducerOptions{.blocks = 0}, ReducerOptions{.blocks = 5000}, ReducerOptions{.threads = 1024},
        ReducerOptions{.threads = 33}, ReducerOptions{.threads = 32}}) {
    const auto made = Reducer::make(*device, options);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, ErrorCode::invalid_argument);
  }
  const auto on_host = Reducer::make(*make_host(), {});
  ASSERT_FALSE(on_host);
  EXPECT_EQ(on_host.error().code, ErrorCode::unavailable);
}

// Each block has a multiprocessor to itself for as long as it stays.
TEST_F(Kernels, OnesThatStayLeaveTheTrainersAtLeastHalfOfTheDevice) {
  const fake::Control fake{cuda_library().c_str()};
  if (fake.set_options == nullptr) GTEST_SKIP() << "a real device has as many multiprocessors as it has";
  const auto made = [&](unsigned multiprocessors, unsigned blocks, bool stays) {
    fake.set_options({.multiprocessors = multiprocessors});
    auto reducer = Reducer::make(*device, {.blocks = blocks, .threads = 64, .external_launcher = stays});
    fake.set_options({});
    return reducer;
  };
  for (const auto& [there, chosen] : {std::pair{132u, 8u}, {14u, 3u}, {8u, 2u}, {1u, 1u}})
    EXPECT_EQ((*made(there, 0, true))->blocks(), chosen) << there;
  EXPECT_EQ((*made(14, 7, true))->blocks(), 7u);
  EXPECT_TRUE(made(14, 14, false)) << "nobody else is there";
  const auto all = made(14, 8, true);
  ASSERT_FALSE(all);
  EXPECT_EQ(all.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(all.error().message.find("at most 7"), std::string::npos) << all.error().message;
}

// Whoever held a kernel would wait in its launch until somebody lets it go, who has not heard of it.
TEST_F(Kernels, LaunchesThatWaitForTheirKernelsAreRefusedWhereOneWouldBeHeld) {
  const fake::Control fake{cuda_library().c_str()};
  if (fake.set_options == nullptr) GTEST_SKIP() << "a real driver does so from its start or never";
  fake.set_options({.blocking = true});
  const auto held = Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  const auto not_held = Reducer::make(*device, {.blocks = 2, .threads = 64});
  fake.set_options({});
  EXPECT_TRUE(not_held);
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().code, ErrorCode::unavailable);
  EXPECT_NE(held.error().message.find("unset CUDA_LAUNCH_BLOCKING"), std::string::npos) << held.error().message;
}

TEST_F(Kernels, DigestsAreTheCpus) {
  auto digester = *Digester::make(*device);
  Bytes bytes(37 * MiB + 12345);  // in several launches
  std::mt19937_64 random(3);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  auto memory = *device->allocate(bytes.size());
  in(memory.bytes.data(), bytes);
  std::vector<std::span<const std::byte>> pieces;
  std::vector<std::uint64_t> expected;
  const auto piece = [&](std::size_t offset, std::size_t size) {
    pieces.push_back(memory.bytes.subspan(offset, size));
    expected.push_back(digest(BytesView(bytes).subspan(offset, size)));
  };
  piece(0, bytes.size());
  for (const std::size_t size : {0, 1, 16, 240, 241, 4095, 4096, 4097, 8192, 100000, 1048576, 5000001})
    piece(16 * (size % 7), size);
  for (std::size_t i = 0; i < 2000; ++i) piece(i * 4112, 4096 + i % 50);  // more than one launch takes
  EXPECT_EQ(*digester->digests(pieces), expected);
  const std::span<const std::byte> odd[] = {memory.bytes.subspan(8, 100)};
  EXPECT_FALSE(digester->digests(odd));
}

TEST_F(Kernels, WhatAStreamIsToDoLaterWaitsForAFlag) {
  auto pinned = *device->allocate_pinned(4096);
  auto& flag = *reinterpret_cast<std::uint64_t*>(pinned.bytes.data());
  flag = 4;
  ASSERT_TRUE(stream->wait_until(&flag, 5));
  const auto behind = *stream->mark();
  EXPECT_LT(*stream->reached(), behind);
  std::atomic_ref(flag).store(6);
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(*stream->reached(), behind);
}

}  // namespace
}  // namespace rejoin::device
