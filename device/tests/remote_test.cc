// A GPU's memory, served to who has no context on that GPU: one made of software here.
#include "device/remote.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <future>
#include <random>
#include <thread>

#include "base/digest.h"
#include "base/unix_socket.h"
#include "device/remote_wire.h"
#include "device/tests/library.h"

namespace rejoin::device {
namespace {

using namespace std::chrono_literals;

Bytes some_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

struct Served : testing::Test {
  static constexpr std::size_t kSize = 5 * MiB + 48;
  std::shared_ptr<Device> gpu = test_gpu();
  Memory memory = *gpu->allocate(kSize), secret = *gpu->allocate(4096);
  std::unique_ptr<Access> here = *gpu->make_access();
  std::unique_ptr<MemoryServer> server = *MemoryServer::make(gpu, {memory.bytes});

  // Once the server has made it.
  Line next_line() {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    for (;;) {
      if (auto line = server->next()) return std::move(*line);
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no line is made");
      std::this_thread::yield();
    }
  }
  std::shared_ptr<RemoteDevice> connect() { return *connect_remote(next_line(), "cuda:test"); }
  // As the other process sees it.
  static Memory import(Device& remote, std::span<const std::byte> memory) {
    const Handle handle{.kind = Handle::Kind::address,
                        .size = memory.size(),
                        .address = reinterpret_cast<std::uint64_t>(memory.data())};
    return *remote.import_shared({&handle, 1});
  }
};

// A daemon that is killed, and its successor, may be offered memory one after the other within microseconds.
TEST_F(Served, OfLinesThatNobodyHasUsedNoneIsEndedByWhoeverAsksForTheNext) {
  const auto stream = *gpu->make_stream();
  const Memory flags = *gpu->allocate_pinned(4096);
  auto& flag = *new (flags.bytes.data()) std::uint64_t(0);
  for (std::uint64_t round = 1; round <= 100; ++round) {
    (void)next_line();  // the server is awake, and making others
    ASSERT_TRUE(stream->wait_until(&flag, round));
    // This thread has let no stream wait: the driver of software ends the program where it enters it now.
    std::thread([&] {
      for (int i = 0; i < 3; ++i) (void)server->next();
    }).join();
    std::atomic_ref(flag).store(round);
    ASSERT_TRUE(stream->synchronize());
  }
}

// A daemon is killed while its trainer's stream waits for a bucket, and the trainer has others to hand over. What the
// daemon was served by is unpinned later: the driver would wait for that stream, and the trainer for the driver.
TEST_F(Served, ALineThatEndsStopsNobodyWhileAStreamWaits) {
  const auto waiting = *gpu->make_stream(), other = *gpu->make_stream();
  const Memory flags = *gpu->allocate_pinned(4096);
  auto& flag = *new (flags.bytes.data()) std::uint64_t(0);
  const Line line = next_line();
  std::promise<void> waits;
  auto trainer = std::async(std::launch::async, [&] {
    EXPECT_TRUE(waiting->wait_until(&flag, 1));
    waits.set_value();
    pollfd ended{line.socket.get(), 0, 0};
    do EXPECT_TRUE(other->mark());
    while (::poll(&ended, 1, 1) == 0);
  });
  waits.get_future().wait();
  ::shutdown(line.socket.get(), SHUT_WR);
  EXPECT_EQ(trainer.wait_for(20s), std::future_status::ready) << "the driver stands still";
  std::atomic_ref(flag).store(1);
  trainer.get();
  ASSERT_TRUE(waiting->synchronize());
  std::size_t released = 0;
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (released == 0 && std::chrono::steady_clock::now() < deadline) released += server->release_ended();
  EXPECT_EQ(released, 1u);
}

TEST_F(Served, BytesGoBothWaysAndDigestsAreTheSame) {
  const auto remote = connect();
  const auto there = *remote->make_access();
  const auto state = import(*remote, memory.bytes).bytes;
  EXPECT_NE(state.data(), memory.bytes.data()) << "those addresses may be of something else there";
  const Bytes bytes = some_bytes(kSize, 1);
  ASSERT_TRUE(there->write(state.data(), bytes));
  Bytes back(kSize);
  ASSERT_TRUE(here->read(memory.bytes, back.data()));
  EXPECT_EQ(back, bytes);
  ASSERT_TRUE(here->write(memory.bytes.data(), some_bytes(kSize, 2)));
  ASSERT_TRUE(there->read(state, back.data()));
  EXPECT_EQ(back, some_bytes(kSize, 2));
  std::vector<BytesView> ranges;  // more than go in one request
  for (std::size_t i = 0; i < 2 * remote::kMostRanges + 3; ++i) ranges.push_back(state.subspan(16 * i, 4096 + i));
  const auto digests = *there->digests(ranges);
  ASSERT_EQ(digests.size(), ranges.size());
  for (std::size_t i = 0; i < ranges.size(); ++i)
    EXPECT_EQ(digests[i], digest(BytesView(back).subspan(16 * i, 4096 + i))) << i;
  EXPECT_TRUE(there->digests({})->empty());
}

TEST_F(Served, CopiesOfAStreamAreDoneInOrder) {
  const auto remote = connect();
  auto stream = *remote->make_stream();
  auto pinned = *remote->allocate_pinned(2 * MiB);
  const auto state = import(*remote, memory.bytes).bytes;
  EXPECT_EQ(*stream->reached(), 0u);
  const Bytes bytes = some_bytes(1 * MiB, 3);
  std::copy(bytes.begin(), bytes.end(), pinned.bytes.begin());
  std::uint64_t before = 0;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(stream->copy(state.data() + 16 * i, pinned.bytes.data(), 1 * MiB));
    ASSERT_TRUE(stream->copy(pinned.bytes.data() + 1 * MiB, state.data() + 16 * i, 1 * MiB));
    const auto mark = *stream->mark();
    EXPECT_GT(mark, before);
    before = mark;
  }
  while (*stream->reached() < before) std::this_thread::yield();
  EXPECT_TRUE(*stream->idle());
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), pinned.bytes.begin() + 1 * MiB));
  EXPECT_EQ(remote->allocate_pinned(remote::kMemoryBytes).error().code, ErrorCode::exhausted);
}

TEST_F(Served, WhoAsksForOtherMemoryIsServedNoLonger) {
  struct Wrong {
    const std::byte* from;
    std::size_t size;
  };
  for (const Wrong wrong : {Wrong{secret.bytes.data(), 16}, Wrong{memory.bytes.data() + kSize - 8, 16},
                            Wrong{memory.bytes.data() + 16, ~std::size_t{0} - 8}, Wrong{memory.bytes.data() - 1, 2}}) {
    const auto remote = connect();
    const auto there = *remote->make_access();
    const auto state = import(*remote, {wrong.from, 16}).bytes;
    EXPECT_FALSE(there->digests(std::vector{BytesView(state.data(), wrong.size)})) << wrong.size;
    EXPECT_EQ(there->digests(std::vector{BytesView(import(*remote, memory.bytes.first(16)).bytes)}).error().code,
              ErrorCode::unavailable);
  }
  const auto remote = connect();
  const auto there = *remote->make_access();
  EXPECT_FALSE(there->digests(std::vector{BytesView(memory.bytes.first(16))})) << "it was not imported";
  const auto next = connect();
  const auto access = *next->make_access();
  EXPECT_TRUE(access->digests(std::vector{BytesView(import(*next, memory.bytes).bytes)})) << "the next is served";
}

// As of a process that is out of its mind.
TEST_F(Served, RequestsThatMakeNoSenseEndTheLine) {
  using remote::Kind, remote::Range, remote::Request;
  const auto address = reinterpret_cast<std::uint64_t>(memory.bytes.data());
  const auto with = [](Request request, const std::vector<Range>& ranges) {
    return joined(request, std::as_bytes(std::span(ranges)));
  };
  const Range right{.address = address, .offset = remote::kHeaderBytes, .size = 16};
  Range over_the_header = right, behind_the_end = right, around = right;
  over_the_header.offset = 0;
  behind_the_end.offset = remote::kMemoryBytes - 8;
  around.offset = ~std::uint64_t{0} - 8;
  for (const Bytes& message :
       {Bytes(1), Bytes(sizeof(Request) - 1), with({.kind = Kind::to_host, .count = 2}, {right, right}),
        with({.kind = Kind::to_host, .count = 0}, {}), with({.kind = Kind::to_host, .count = 1}, {over_the_header}),
        with({.kind = Kind::to_device, .count = 1}, {behind_the_end}),
        with({.kind = Kind::to_device, .count = 1}, {around}), with({.kind = Kind::digest, .count = 2}, {right}),
        with({.kind = static_cast<Kind>(9), .count = 0}, {}), with({.kind = Kind::digest, .count = ~0u}, {right})}) {
    const Line line = next_line();
    ASSERT_TRUE(send_with_fds(line.socket, message, {}));
    pollfd ended{line.socket.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&ended, 1, 20000), 1);
    EXPECT_FALSE(receive_with_fds(line.socket, 4096)) << message.size();
  }
}

// Nothing that the one before asks for any more is done.
TEST_F(Served, WhoeverComesNextEndsTheLineBefore) {
  const auto first = connect();
  const auto of_first = *first->make_access();
  const auto at_first = import(*first, memory.bytes).bytes;
  ASSERT_TRUE(of_first->write(at_first.data(), some_bytes(64, 4)));
  const auto second = connect();
  const auto of_second = *second->make_access();
  const auto at_second = import(*second, memory.bytes).bytes;
  Bytes back(64);
  ASSERT_TRUE(of_second->read(at_second.first(64), back.data()));
  EXPECT_EQ(back, some_bytes(64, 4));
  EXPECT_FALSE(of_first->write(at_first.data(), Bytes(64)));
  ASSERT_TRUE(of_second->read(at_second.first(64), back.data()));
  EXPECT_EQ(back, some_bytes(64, 4));
}

// As of a trainer that leaves, and uses the memory otherwise: what a daemon has asked for by then may still be queued,
// also where that has gone since.
TEST_F(Served, NothingIsDoneAnyMoreForALineThatHasBeenEnded) {
  constexpr std::size_t size = 4 * MiB;
  for (int round = 0; round < 5; ++round) {
    auto remote = connect();
    auto stream = *remote->make_stream();
    auto pinned = *remote->allocate_pinned(size);
    auto state = import(*remote, memory.bytes);
    std::ranges::fill(pinned.bytes, std::byte{0x55});
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(stream->copy(state.bytes.data(), pinned.bytes.data(), size));
    remote->disconnect();
    ASSERT_TRUE(server->end_served(20s));
    ASSERT_TRUE(here->write(memory.bytes.data(), Bytes(size, std::byte{0x11})));
    // Its successor is served behind whatever was still to be done.
    const auto next = connect();
    Bytes back(size);
    ASSERT_TRUE((*next->make_access())->read(import(*next, memory.bytes).bytes.first(size), back.data()));
    EXPECT_EQ(std::ranges::count(back, std::byte{0x11}), static_cast<std::ptrdiff_t>(size)) << round;
  }
  EXPECT_TRUE(server->end_served(20s)) << "once more, and nobody is served";
  EXPECT_TRUE(server->end_served(20s));
}

TEST_F(Served, AfterTheServersEndThereAreErrors) {
  const auto remote = connect();
  const auto there = *remote->make_access();
  auto stream = *remote->make_stream();
  const auto state = import(*remote, memory.bytes).bytes;
  ASSERT_TRUE(there->write(state.data(), Bytes(64)));
  server.reset();
  const auto gone = there->write(state.data(), Bytes(64));
  ASSERT_FALSE(gone);
  EXPECT_NE(gone.error().message.find("its trainer is gone"), std::string::npos) << gone.error().message;
  EXPECT_FALSE(stream->reached());
  EXPECT_FALSE(stream->synchronize());
}

// Of a trainer that is stopped: it neither answers nor ends.
TEST(Remote, WhoWaitsIsWokenByDisconnect) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const Fd silent(ends[0]);
  auto remote = *connect_remote({Fd(ends[1]), *make_sealed_memfd("test", remote::kMemoryBytes)}, "cuda:test");
  const auto there = *remote->make_access();
  std::thread waiter([&] { EXPECT_FALSE(there->digests(std::vector{BytesView()})); });
  char asked[64];
  ASSERT_GT(::recv(silent.get(), asked, sizeof asked, 0), 0);  // it waits, or is about to
  remote->disconnect();
  waiter.join();
  auto stream = *remote->make_stream();
  auto pinned = *remote->allocate_pinned(64);
  EXPECT_FALSE(stream->copy(pinned.bytes.data(), nullptr, 64));
}

TEST(Remote, MemoryThatMayShrinkIsRefused) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const Fd other(ends[0]);
  EXPECT_FALSE(connect_remote({Fd(ends[1]), *make_eventfd()}, "cuda:test"));
}

}  // namespace
}  // namespace rejoin::device
