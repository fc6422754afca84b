// Sessions' state and streams on a GPU: one made of software here, a real one in `./run gpu test`.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>

#include "device/tests/library.h"
#include "rejoin/stream_order.h"
#include "rejoin/training_state.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;

struct Streams : testing::Test {
  std::shared_ptr<device::Device> device = device::test_gpu();
  const Fd wake = *make_eventfd();
  std::unique_ptr<device::Stream> stream = *device->make_stream();
  device::Memory word = *device->allocate_pinned(64);  // what the stream is held up with
  std::unique_ptr<StreamOrder> order = *StreamOrder::make(device, 3, wake);

  std::uint64_t& held() { return *reinterpret_cast<std::uint64_t*>(word.bytes.data()); }
  void hold() {
    held() = 0;
    ASSERT_TRUE(stream->wait_until(&held(), 1));
  }
  void let_go() { std::atomic_ref(held()).store(1); }
  // What is reached, when the wake-up for it has come.
  std::vector<StreamOrder::Reached> next() {
    pollfd ready{.fd = wake.get(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(::poll(&ready, 1, 20000), 1);
    drain_eventfd(wake);
    return *order->poll();
  }
};

TEST_F(Streams, ABucketIsReadyWhenItsStreamComesThere) {
  hold();
  ASSERT_TRUE(order->hand_over(2, 7, stream->handle()));
  EXPECT_TRUE(order->poll()->empty());
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
  EXPECT_LT(*stream->reached(), behind);
  order->on_reduced(1, 5);
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
  ASSERT_TRUE(stream->synchronize());
}

TEST_F(Streams, AStreamMayEndBeforeItsSession) {
  ASSERT_TRUE(order->hand_over(0, 9, stream->handle()));
  order->on_reduced(0, 9);
  stream.reset();
  order.reset();
}

TEST(DeviceState, OwnMemoryOfAnotherSizeThanItsGradientsIsRefused) {
  const auto device = device::test_gpu();
  TrainingState state(1 << 20, device);
  const auto a = *state.add({.name = "a", .count = 1000}), b = *state.add({.name = "b", .count = 24});
  auto flat = *device->allocate(8192);
  const auto own = flat.bytes.subspan(64, 1024 * 4);
  const auto wrong = state.bucket({b, a}, own.first(4000));
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().message.find("4096 bytes"), std::string::npos) << wrong.error().message;
}

TEST(DeviceState, GradientsMayLieInTheTrainersOwnMemory) {
  const auto device = device::test_gpu();
  TrainingState state(1 << 20, device);
  const auto a = *state.add({.name = "a", .count = 1000}), b = *state.add({.name = "b", .count = 24}),
             c = *state.add({.name = "c", .count = 100});
  auto flat = *device->allocate(8192);
  const auto own = flat.bytes.subspan(64, 1024 * 4);
  ASSERT_TRUE(state.bucket({b, a}, own));
  ASSERT_TRUE(state.bucket({c}));
  ASSERT_TRUE(state.allocate());
  EXPECT_EQ(state.gradient(b).data(), own.data());
  EXPECT_EQ(state.gradient(a).data(), own.data() + 96);
  EXPECT_EQ(state.buckets()[0].input.data(), own.data());
  EXPECT_NE(state.gradient(c).data(), nullptr);
  // What is updated is the state, from the reduced gradients, by their own addresses.
  ASSERT_TRUE(state.start(0));
  const auto pieces = *state.begin_update(Step(1), true);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[a.index].gradient.data(), state.buckets()[0].output.data() + 96);
  state.end_update(Step(1), true);
}

TEST(DeviceState, ItIsZeroAtFirstAndItsDigestIsTheHostsOne) {
  const auto fill = [](TrainingState& state) {
    const auto w = *state.add({.name = "w", .count = 400'003, .moments = 1});
    EXPECT_TRUE(state.bucket({w}));
    EXPECT_TRUE(state.allocate());
    const auto device = state.owner().device();
    const auto access = *device::Access::make(*device);
    Bytes seen(state.column(w, 1).size(), std::byte{1});
    EXPECT_TRUE(access->read(state.column(w, 1), seen.data()));
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](auto byte) { return byte == std::byte{0}; }));
    for (std::size_t i = 0; i < seen.size(); ++i) seen[i] = static_cast<std::byte>(i * 17 >> 3);
    EXPECT_TRUE(access->write(state.column(w, 0).data(), seen));
    return *state.digest();
  };
  TrainingState on_gpu(16 << 20, device::test_gpu()), on_host(16 << 20);
  EXPECT_EQ(fill(on_gpu), fill(on_host));
}

}  // namespace
}  // namespace rejoin
