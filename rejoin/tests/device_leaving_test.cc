// How a session leaves whose state is on a GPU, one made of software here. Its daemon is this test's.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "base/unix_socket.h"
#include "device/remote.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "local/offer.h"
#include "membership/versions.h"
#include "rejoin/progress_thread.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;

// Who serves the GPU's memory stands before a copy until it may go on.
struct Served {
  static inline std::atomic<bool> stands = false, may_go_on = false;
  static void on_call(const char*) {
    char name[16] = {};
    (void)::pthread_getname_np(::pthread_self(), name, sizeof name);
    if (std::string_view(name) != "rejoin-memory") return;
    stands = true;
    stands.notify_all();
    may_go_on.wait(false);
  }
  static void go_on() {
    may_go_on = true;
    may_go_on.notify_all();
  }
};

struct Leaving : testing::Test {
  static constexpr std::size_t kElements = 1 << 16;
  static constexpr auto kSilence = 20s;

  Leaving() { Served::stands = Served::may_go_on = false; }
  ~Leaving() override {  // also of a test that has failed in the middle
    Served::go_on();
    if (fake.set_hook != nullptr) fake.set_hook(nullptr);
  }
  void say(const proto::ToTrainer& message) {
    ASSERT_TRUE(send_with_fds(daemon, as_bytes(message.SerializeAsString()), {}));
  }
  // The next message that `is` holds of, with what came along.
  template <typename Is>
  std::pair<proto::FromTrainer, std::vector<Fd>> hear(Is is) {
    for (const auto deadline = std::chrono::steady_clock::now() + kSilence; std::chrono::steady_clock::now() < deadline;
         std::this_thread::yield()) {
      if (!daemon) daemon = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      auto received = daemon ? receive_with_fds(daemon, local::kMaxMessage) : std::optional<Received>{};
      proto::FromTrainer message;
      if (received && *received &&
          message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())) && is(message))
        return {message, std::move((*received)->fds)};
    }
    ADD_FAILURE() << "the trainer says nothing";
    return {};
  }
  void joins(std::chrono::milliseconds silence = kSilence) {
    const auto tensor = state.add({.name = "weights", .count = kElements});
    ASSERT_TRUE(tensor && state.bucket({*tensor}) && state.allocate() && state.start(0));
    weights = state.column(*tensor, 0);
    SessionConfig config;
    config.transport = "tcp";
    config.socket = socket;
    trainer.emplace(config, state, interrupt, "", "", false);
    auto joined = std::async(std::launch::async, [&] { return trainer->join(Position{}, 0, {}); });
    auto [message, fds] = hear([](const auto& one) { return one.has_hello(); });
    ASSERT_GE(fds.size(), 3u);
    device::Line line{.socket = std::move(fds[fds.size() - 2]), .memory = std::move(fds.back())};
    remote = *device::connect_remote(std::move(line), "cuda:test");
    proto::ToTrainer answer;
    answer.mutable_welcome()->set_protocol(membership::kProtocolVersion);
    answer.mutable_welcome()->set_silence_ms(silence / 1ms);
    answer.mutable_welcome()->set_data_secret(std::string(32, 's'));
    say(answer);
    auto& registered = *answer.mutable_control()->mutable_registered();
    registered.set_instance(message.hello().up().instance());
    registered.set_incarnation(1);
    say(answer);
    const auto in = joined.get();
    ASSERT_TRUE(in) << in.error().message;
  }
  // What the daemon does with: the state, a stream, and memory of its own.
  auto copies_with() {
    const device::Handle handle{.kind = device::Handle::Kind::address,
                                .size = weights.size(),
                                .address = reinterpret_cast<std::uint64_t>(weights.data())};
    return std::tuple{*remote->import_shared({&handle, 1}), *remote->make_stream(),
                      *remote->allocate_pinned(weights.size())};
  }
  // While the GPU is at a copy of its state, for longer than the silence.
  Result<> leaves_meanwhile(local::SliceState slices) {
    joins(300ms);
    if (HasFatalFailure()) return {};
    auto& owner = state.owner();
    for (std::size_t i = 0; i < owner.manifest().slices().size(); ++i)
      owner.page().slice_statuses()[i] = local::SliceStatus{slices, 0}.packed();
    const auto [there, stream, pinned] = copies_with();
    fake.set_hook(&Served::on_call);
    EXPECT_TRUE(stream->copy(pinned.bytes.data(), there.bytes.data(), weights.size()));
    Served::stands.wait(false);
    auto left = std::async(std::launch::async, [&] { return trainer->leave(); });
    hear([](const auto& one) { return one.has_leave(); });
    remote->disconnect();
    proto::ToTrainer answer;
    answer.mutable_left();
    say(answer);
    auto gone = left.get();
    Served::go_on();
    return gone;
  }

  const std::string socket = "@device_leaving_test." + std::to_string(::getpid());
  const Fd listener = *listen_unix(socket);
  Fd daemon;
  std::shared_ptr<device::Device> gpu = device::test_gpu();
  const device::fake::Control fake{device::cuda_library().c_str()};  // all null with a real driver
  std::unique_ptr<device::Access> access = *gpu->make_access();
  TrainingState state{1 << 22, gpu};
  std::span<std::byte> weights;
  Interrupt interrupt{*make_eventfd()};
  std::shared_ptr<device::RemoteDevice> remote;
  std::optional<ProgressThread> trainer;
};

// Its daemon has asked for slices to be copied into it, and has shut its line behind that when it says that the trainer
// has left.
TEST_F(Leaving, NothingIsCopiedIntoItsStateOnceItHasLeft) {
  joins();
  if (HasFatalFailure()) return;
  const auto [there, stream, pinned] = copies_with();
  std::ranges::fill(pinned.bytes, std::byte{0x55});
  auto left = std::async(std::launch::async, [&] { return trainer->leave(); });
  hear([](const auto& one) { return one.has_leave(); });
  if (fake.set_hook != nullptr) fake.set_hook(&Served::on_call);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->copy(there.bytes.data(), pinned.bytes.data(), weights.size()));
  const auto deadline = std::chrono::steady_clock::now() + kSilence;
  while (fake.set_hook != nullptr && !Served::stands && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  remote->disconnect();
  proto::ToTrainer answer;
  answer.mutable_left();
  say(answer);
  const bool early = fake.set_hook != nullptr && left.wait_for(100ms) == std::future_status::ready;
  if (!early) Served::go_on();
  const auto gone = left.get();
  EXPECT_TRUE(gone) << gone.error().message;
  const Bytes others(weights.size(), std::byte{0x11});
  ASSERT_TRUE(access->write(weights.data(), others));
  Served::go_on();
  trainer.reset();  // with whatever it had still to do
  Bytes back(weights.size());
  ASSERT_TRUE(access->read(weights, back.data()));
  EXPECT_EQ(std::ranges::count(back, std::byte{0x11}), static_cast<std::ptrdiff_t>(back.size()));
}

TEST_F(Leaving, WhatIsStillCopiedOutOfAContributorIsNoFailure) {
  if (fake.set_hook == nullptr) GTEST_SKIP() << "no driver here stands where it is told to";
  const auto gone = leaves_meanwhile(local::SliceState::current);
  EXPECT_TRUE(gone) << gone.error().message;
}

TEST_F(Leaving, WhatIsStillCopiedIntoAJoinerIs) {
  if (fake.set_hook == nullptr) GTEST_SKIP() << "no driver here stands where it is told to";
  const auto gone = leaves_meanwhile(local::SliceState::arrived);
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, ErrorCode::timeout);
  EXPECT_NE(gone.error().message.find("has copied into this state on a GPU is not over"), std::string::npos);
}

}  // namespace
}  // namespace rejoin
