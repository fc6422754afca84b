// A state on a GPU: whose memory it lies in, and its digest. The GPU is made of software here, a real one in
// `./run gpu test`.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "base/digest.h"
#include "device/digester.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "rejoin/session.h"
#include "rejoin/training_state.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;

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

// What fills the state is still queued on a stream of the trainer's, as a framework's copies are. No daemon is there.
struct FilledState : testing::Test {
  static constexpr std::size_t kBytes = 1 << 20;
  static inline std::atomic<std::uint64_t*> held = nullptr;
  static void let_go() {
    if (auto* flag = held.exchange(nullptr)) std::atomic_ref(*flag).store(1);
  }
  static void on_call(const char* call) {
    if (std::string_view(call) == "cuCtxSynchronize") let_go();
  }
  std::shared_ptr<device::Device> device = device::test_gpu();  // loaded by its path, and found by its name later
  const device::fake::Control fake{device::cuda_library().c_str()};
  device::Memory flag = *device->allocate_pinned(64), bytes = *device->allocate_pinned(kBytes);
  std::unique_ptr<device::Stream> stream = *device->make_stream();

  void SetUp() override {
    if (fake.set_hook == nullptr) GTEST_SKIP() << "a real driver does not tell when it is called";
    fake.set_hook(on_call);
    for (std::size_t i = 0; i < kBytes; ++i) bytes.bytes[i] = static_cast<std::byte>(i * 17 >> 3);
  }
  ~FilledState() override {  // also of a test that has failed in the middle
    if (fake.set_hook == nullptr) return;
    let_go();
    fake.set_hook(nullptr);
    EXPECT_TRUE(stream->synchronize());
  }
  std::unique_ptr<Session> open() {
    SessionConfig config;
    config.device = "cuda:0";
    config.socket = "no-daemon-is-here.socket";
    config.flight = "off";
    config.patience = 0ms;
    auto session = *Session::open(config);
    const auto w = *session->add({.name = "w", .count = kBytes / 4});
    EXPECT_TRUE(session->bucket({w}) && session->allocate());
    auto& held_up = *reinterpret_cast<std::uint64_t*>(flag.bytes.data());
    held_up = 0;
    held = &held_up;
    EXPECT_TRUE(stream->wait_until(&held_up, 1));
    EXPECT_TRUE(stream->copy(session->weight(w)->data(), bytes.bytes.data(), kBytes));
    return session;
  }
};

TEST_F(FilledState, IsDigestedWhenTheTrainersStreamsHaveFilledIt) {
  const auto session = open();
  const auto first = session->state_digest();
  ASSERT_TRUE(first) << first.error().message;
  let_go();
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(*first, *session->state_digest());
  // A session with the same state, filled likewise, joins from the position.
  const auto other = open();
  const auto joined = other->join(Position(7, {}, *first));
  let_go();
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().code, ErrorCode::unavailable) << joined.error().message;
}

}  // namespace
}  // namespace rejoin
