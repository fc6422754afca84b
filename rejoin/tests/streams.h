// What tests of sessions' streams on a GPU stand on.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "device/reducer.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "rejoin/stream_order.h"

namespace rejoin {

// A session's order of streams, the reducer whose kernel it keeps on the device, and a stream of the trainer's.
struct Streams : testing::Test {
  std::shared_ptr<device::Device> device = device::test_gpu();
  std::shared_ptr<device::Reducer> reducer =
      *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
  std::unique_ptr<device::Stream> stream = *device->make_stream();
  const device::fake::Control fake{device::cuda_library().c_str()};  // all null with a real driver
  device::Memory flag = *device->allocate_pinned(64);                // what the stream is held up with
  int woken = 0;
  std::unique_ptr<StreamOrder> order = *StreamOrder::make(device, reducer, 300, [this] { ++woken; });

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
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      auto reached = order->poll();
      if (!reached.empty()) return reached;
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "no stream has come anywhere";
        order->release();  // whoever stands in the driver for good goes on
        return {};
      }
      device::pause();
    }
  }
};

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
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (auto done = reducer->done(); done && *done < *given; done = reducer->done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the kernel is not there";
      device::pause();
    }
  }
  // Hands over `buckets` and then does this, while another thread reduces them.
  void hand_over_and(std::uint32_t buckets, const std::function<void()>& what) {
    ++step;
    std::thread progress([&] {
      for (std::uint32_t i = 0; i < buckets && !HasFailure();)
        for (const auto& reached : next()) {
          reduce();
          order->on_reduced(*reached.bucket, step);
          ++i;
        }
    });
    for (std::uint32_t i = 0; i < buckets; ++i) EXPECT_TRUE(order->hand_over(i, step, stream->handle()));
    what();
    progress.join();
    ASSERT_TRUE(stream->synchronize());
    EXPECT_FALSE(order->streams_wait());
  }
};

}  // namespace rejoin
