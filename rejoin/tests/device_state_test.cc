// A state on a GPU: whose memory it lies in, and its digest. The GPU is made of software here, a real one in
// `./run gpu test`.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/digest.h"
#include "device/digester.h"
#include "device/tests/library.h"
#include "rejoin/training_state.h"

namespace rejoin {
namespace {

TEST(DeviceState, OwnMemoryOfAnotherSizeThanItsGradientsIsRefused) {
  const auto device = device::test_gpu();
  TrainingState state(1 << 20, device);
  const auto a = *state.add({.name = "a", .count = 1000}), b = *state.add({.name = "b", .count = 24});
  auto flat = *device->allocate(8192);
  const auto own = flat.bytes.subspan(64, 1024 * 4);
  EXPECT_FALSE(state.bucket({b, a}, own.first(0))) << "it would be reduced elsewhere";
  const auto wrong = state.bucket({b, a}, own.first(4000));
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().message.find("4096 bytes"), std::string::npos) << wrong.error().message;
}

// A kernel that adds there would end this process's work on the GPU, and that of the others in the same step.
TEST(DeviceState, OwnMemoryOfAGpuWhereNoElementCanLieIsRefused) {
  for (const auto& device : {device::test_gpu(), device::make_host()}) {
    TrainingState state(1 << 20, device);
    const auto a = *state.add({.name = "a", .count = 1000}),
               b = *state.add({.name = "b", .count = 24, .gradient_type = DataType::bfloat16});
    auto flat = *device->allocate(8192);
    const auto odd = state.bucket({a}, flat.bytes.subspan(66, 4000));
    EXPECT_TRUE(state.bucket({b}, flat.bytes.subspan(4098, 48)));
    ASSERT_EQ(odd.has_value(), device->kind() == device::MemoryKind::host);
    if (!odd) {
      EXPECT_EQ(odd.error().message.find("bucket 0: the memory for its gradients at 0x"), 0u) << odd.error().message;
      EXPECT_NE(odd.error().message.find("a multiple of 4"), std::string::npos) << odd.error().message;
    }
  }
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
  const auto updates = *state.begin_update(Step(1), true, 1);
  ASSERT_EQ(updates.size(), 3u);
  EXPECT_EQ(updates[a.index].gradient.data(), state.buckets()[0].output.data() + 96);
  state.end_update(Step(1), true);
}

TEST(DeviceState, ItIsZeroAtFirstAndItsDigestIsTheHostsOne) {
  const auto fill = [](TrainingState& state) {
    const auto w = *state.add({.name = "w", .count = 400'003, .moments = 1});
    EXPECT_TRUE(state.bucket({w}));
    EXPECT_TRUE(state.allocate());
    const auto device = state.owner().device();
    const auto access = *device->make_access();
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
