// What becomes of messages, receive buffers and numbers when queue pairs are rebuilt or destroyed, on devices made of
// software.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "transport/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/fake_verbs_state.h"
#include "transport/tests/same_bytes.h"
#include "transport/tests/within.h"

namespace rejoin::transport {
namespace {

struct Talker {
  std::unique_ptr<Engine> engine;
  std::vector<EndpointId> up, closed;
  std::vector<std::pair<EndpointId, std::string>> messages;
  std::uint64_t completed = 0, failed = 0;
  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted || event.kind == EventKind::connected) up.push_back(event.endpoint);
      if (event.kind == EventKind::closed) closed.push_back(event.endpoint);
      if (event.kind == EventKind::message) messages.emplace_back(event.endpoint, as_text(event.message));
      if (event.kind == EventKind::completed) ++(event.error ? failed : completed);
    }
  }
  // When it wakes, the control connections come before the completions.
  void doze() {
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
      poll();
      return engine->arm();
    }));
  }
  void say(EndpointId endpoint, const std::string& what) { ASSERT_TRUE(engine->send(endpoint, as_bytes(what))); }
};

struct VerbsQueuePairs : testing::Test {
  Talker a{*make_engine("ibverbs:fake0")}, b{*make_engine("ibverbs:fake1")};
  Address address = *b.engine->listen({"0.0.0.0:0"});
  VerbsQueuePairs() { spdlog::set_level(spdlog::level::off); }

  template <typename Done>
  [[nodiscard]] bool until(Done&& done) {
    return within(std::chrono::seconds(20), [&] {
      a.poll();
      b.poll();
      return done();
    });
  }
  void connect() {
    const std::size_t ups = a.up.size() + b.up.size();
    ASSERT_TRUE(a.engine->connect(address, {}));
    ASSERT_TRUE(until([&] { return a.up.size() + b.up.size() == ups + 2; }));
  }
  // They lie completed at B, which has not looked.
  void send_unseen(EndpointId endpoint, int count) {
    const auto received = [&] {
      std::size_t all = 0;
      for (const auto* queue : fake::queues) all += queue->completions.size();
      return all;
    };
    const std::size_t before = received();
    for (int i = 0; i < count; ++i) a.say(endpoint, std::to_string(i));
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
      a.poll();
      return received() >= before + static_cast<std::size_t>(count);
    }));
  }
};

TEST_F(VerbsQueuePairs, ReceiveBuffersOfMessagesThatNobodyReadAreUsedAgain) {
  for (int i = 0; i < 8; ++i) {  // more messages together than there are buffers
    connect();
    send_unseen(a.up.back(), 100);
    b.engine->close(b.up.back());
    a.engine->close(a.up.back());
  }
  connect();
  a.say(a.up.back(), "the last");
  ASSERT_TRUE(until([&] { return !b.messages.empty(); })) << "it has no receive buffers left";
  EXPECT_EQ(b.messages.back().second, "the last");
}

TEST_F(VerbsQueuePairs, OfAChainOfReceiveBuffersTheDeviceHasThoseThatItTookOnce) {
  connect();
  fake::takes_receives = 5;
  for (int i = 0; i < 300; ++i) {
    a.say(a.up.back(), std::to_string(i));
    ASSERT_TRUE(until([&] { return b.messages.size() > static_cast<std::size_t>(i); }));
  }
  EXPECT_FALSE(fake::takes_receives) << "no buffer was given back";
  for (const auto& [number, pair] : fake::pairs) {
    std::set<std::uint64_t> once;
    for (const auto& buffer : fake::fake<fake::FakeSrq>(pair->pair.srq)->buffers)
      EXPECT_TRUE(once.insert(buffer.first).second) << buffer.first;
  }
}

TEST_F(VerbsQueuePairs, WhatWasReceivedBeforeAQueuePairIsRebuiltIsNotLost) {
  connect();
  std::vector<std::byte> from(4 * KiB), to(4 * KiB);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  const Write write{.local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = to.size(), .notify = {}};
  ASSERT_TRUE(a.engine->write(a.up.front(), {&write, 1}));
  ASSERT_TRUE(until([&] { return a.completed == 1; }));
  b.engine->deregister(target);
  const RegionId another = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  b.doze();  // A is told that it is no more, but has not looked
  for (int i = 0; i < 50; ++i) a.say(a.up.front(), std::to_string(i));
  // One on each queue pair, so that the one of the messages is among them.
  const Write refused[] = {write, write};
  ASSERT_TRUE(a.engine->write(a.up.front(), refused));
  // While busy it looks at its control connections, by which it tells of that, with every 256th poll.
  int polls = 0;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    a.poll();
    return a.failed == 2 && ++polls > 600;
  }));
  ASSERT_TRUE(until([&] { return b.messages.size() >= 50; }));
  a.say(a.up.front(), "50");
  const Write again{.local = {source, 0}, .remote = {b.engine->remote(another), 0}, .length = to.size(), .notify = {}};
  ASSERT_TRUE(a.engine->write(a.up.front(), {&again, 1}));
  ASSERT_TRUE(until([&] { return b.messages.size() >= 51 && a.completed == 2; }));
  ASSERT_EQ(b.messages.size(), 51u);
  for (std::size_t i = 0; i < 51; ++i) EXPECT_EQ(b.messages[i].second, std::to_string(i));
  EXPECT_TRUE(a.closed.empty() && b.closed.empty());
}

TEST_F(VerbsQueuePairs, WhatAClosedEndpointReceivedIsNotGivenToTheNextOneWithItsNumbers) {
  connect();
  connect();
  send_unseen(a.up[1], 5);
  b.engine->close(b.up[0]);
  b.engine->close(b.up[1]);
  // The numbers of what was closed are given again here.
  const EndpointId back = *b.engine->connect(*a.engine->listen({"0.0.0.0:0"}), {});
  const auto is_up = [&] { return std::find(b.up.begin(), b.up.end(), back) != b.up.end(); };
  ASSERT_TRUE(until([&] { return is_up() && a.up.size() == 3; }));
  b.say(back, "hello");
  ASSERT_TRUE(until([&] { return !a.messages.empty(); }));
  EXPECT_TRUE(b.messages.empty());
  EXPECT_EQ(std::count(b.closed.begin(), b.closed.end(), back), 0);
}

// As a peer that does not go by the protocol.
TEST_F(VerbsQueuePairs, AWriteThatTakesAReceiveBufferIsNoMessageAndEndsTheEndpoint) {
  std::vector<std::byte> from(64 * KiB), to(64 * KiB);
  (void)*a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  (void)*b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  const auto key = [](const std::vector<std::byte>& memory) {
    return std::find_if(fake::regions.begin(), fake::regions.end(),
                        [&](const auto& entry) { return entry.second->region.addr == memory.data(); })
        ->first;
  };
  for (const std::uint32_t length : {100u, 64u * 1024}) {
    connect();
    const auto mine = std::find_if(fake::pairs.begin(), fake::pairs.end(), [](const auto& entry) {
      return std::string(entry.second->pair.context->device->name) == "fake0";
    });
    ibv_sge piece{.addr = reinterpret_cast<std::uint64_t>(from.data()), .length = length, .lkey = key(from)};
    ibv_send_wr request{}, *refused = nullptr;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    request.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(to.data()), .rkey = key(to)};
    ASSERT_EQ(fake::post_send(&mine->second->pair, &request, &refused), 0);
    const std::size_t ended = b.closed.size();
    ASSERT_TRUE(until([&] { return b.closed.size() > ended; }));
    EXPECT_TRUE(b.messages.empty());
    a.engine->close(a.up.back());
    b.engine->close(b.up.back());
  }
}

TEST_F(VerbsQueuePairs, AnotherPortOfTheDeviceThatGoesDownEndsNothing) {
  connect();
  fake_verbs_port("fake1", false, 2);
  b.doze();
  a.say(a.up.front(), "still here");
  ASSERT_TRUE(until([&] { return !b.messages.empty(); }));
  EXPECT_TRUE(a.closed.empty() && b.closed.empty());
}

TEST_F(VerbsQueuePairs, ACompletionQueueInErrorIsMadeAnew) {
  connect();
  std::vector<std::byte> from(4 * KiB, std::byte{1}), to(4 * KiB);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  fake_verbs_break_queues("fake1");
  b.doze();  // so that it looks at its device
  ASSERT_TRUE(until([&] { return !b.closed.empty() && !a.closed.empty(); }));
  connect();
  a.say(a.up.back(), "again");
  const Write write{.local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = to.size(), .notify = {}};
  ASSERT_TRUE(a.engine->write(a.up.back(), {&write, 1}));
  ASSERT_TRUE(until([&] { return b.messages.size() == 1 && a.completed == 1; }));
  EXPECT_TRUE(same_bytes(from, to));
}

TEST_F(VerbsQueuePairs, WithoutItsDeviceAnEngineRestsAlsoWhenSomebodyWasJustConnecting) {
  ASSERT_TRUE(a.engine->connect(address, {}));
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    a.poll();
    b.poll();
    return fake::pairs.size() > 2;  // B's, too
  }));
  ASSERT_TRUE(b.up.empty());
  fake_verbs_plug("fake1", false);
  b.doze();
  fake_verbs_plug("fake1", true);
}

TEST_F(VerbsQueuePairs, AllThatAPeerSaidBeforeItWentIsHeardBeforeItsEnd) {
  connect();
  b.doze();
  send_unseen(a.up.front(), 300);
  a.engine->close(a.up.front());
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    b.poll();
    return !b.closed.empty();
  }));
  EXPECT_EQ(b.messages.size(), 300u);
}

// A child has the descriptors of the device that was there when it was forked.
TEST(ForkedChildOfVerbs, KeepsNoEngineAwakeForADeviceThatIsLost) {
  spdlog::set_level(spdlog::level::off);
  auto engine = *make_engine("ibverbs:fake0");
  Fd bell;
  for (auto* context : fake::contexts)
    if (std::string_view(context->context.device->name) == "fake0") bell = Fd(::dup(context->pipe_write));
  const pid_t child = ::fork();
  while (child == 0) ::pause();
  const std::shared_ptr<void> ends(nullptr, [child](void*) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  });
  fake_verbs_plug("fake0", false);
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return engine->poll().empty() && fake::contexts.empty(); }));
  ASSERT_EQ(::write(bell.get(), "", 1), 1);
  pollfd waiting{engine->event_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waiting, 1, 10), 0) << "it is woken by what it has closed";
  fake_verbs_plug("fake0", true);
}

}  // namespace
}  // namespace rejoin::transport
