// Staging, over a GPU made of software whose memory the host can't touch.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <set>

#include "device/tests/library.h"
#include "transport/factory.h"
#include "transport/staged/factory.h"
#include "transport/staged/wire.h"
#include "transport/tcp/factory.h"
#include "transport/tests/any_access.h"

namespace rejoin::transport {
namespace {

using namespace std::chrono_literals;

struct Staged : testing::Test {
  struct Side {
    std::unique_ptr<Engine> engine;
    std::vector<Event> events;
    std::map<std::uint64_t, std::optional<Error>> completed;
    std::set<std::uint64_t> written;
    std::vector<EndpointId> accepted, closed;
    std::vector<std::string> hellos;
    bool connected = false;
    std::size_t messages = 0;
    void poll() {
      for (const auto& event : engine->poll()) {
        if (event.kind == EventKind::completed) {
          EXPECT_FALSE(completed.contains(event.value)) << "twice: " << event.value;
          completed[event.value] = event.error;
        }
        if (event.kind == EventKind::written) written.insert(event.value);
        if (event.kind == EventKind::accepted) {
          accepted.push_back(event.endpoint);
          hellos.emplace_back(as_text(event.message));
        }
        if (event.kind == EventKind::connected) connected = true;
        if (event.kind == EventKind::closed) closed.push_back(event.endpoint);
        if (event.kind == EventKind::message) ++messages;
      }
    }
  };
  std::shared_ptr<device::Device> device = device::test_gpu(), host = device::make_host();
  std::unique_ptr<device::Stream> stream = *device->make_stream();
  Side a, b;
  EndpointId at_a, at_b;
  std::size_t slots = 4;

  std::unique_ptr<Engine> engine() {
    return *staged::make_engine(*tcp::make_engine({}), device, {.slot_bytes = 64 * KiB, .slots = slots});
  }
  [[nodiscard]] bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      a.poll();
      if (b.engine) b.poll();
    }
    return true;
  }
  // As their owners do: each side is polled when it says that there is something, or is woken.
  void sleep_until(const std::function<bool()>& done) {
    while (!done()) {
      pollfd ready[] = {{.fd = a.engine->event_fd(), .events = POLLIN, .revents = 0},
                        {.fd = b.engine->event_fd(), .events = POLLIN, .revents = 0}};
      const bool armed[] = {a.engine->arm(), b.engine->arm()};
      const bool both = armed[0] && armed[1];
      ASSERT_TRUE(::poll(ready, 2, both ? 10000 : 0) > 0 || !both) << "it sleeps through what happens";
      for (int i = 0; i < 2; ++i)
        if (!armed[i] || ready[i].revents != 0) (i == 0 ? a : b).poll();
    }
  }
  void connect() {
    a.engine = engine();
    b.engine = engine();
    at_a = *a.engine->connect(*b.engine->listen({"127.0.0.1:0"}), as_bytes("hello"));
    ASSERT_TRUE(until([&] { return a.connected && !b.accepted.empty(); }));
    at_b = b.accepted[0];
    EXPECT_EQ(b.hellos[0], "hello");
  }
  // Memory of either kind, what is in it, and what is to be in it.
  device::Memory make(MemoryKind kind, std::size_t size) {
    return *(kind == MemoryKind::cuda ? device : host)->allocate(size);
  }
  void fill(const device::Memory& memory, int seed) {
    Bytes bytes(memory.bytes.size());
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i * 131 + i / 253) * 7 + seed);
    ASSERT_TRUE(stream->copy(memory.bytes.data(), bytes.data(), bytes.size()));
    ASSERT_TRUE(stream->synchronize());
  }
  Bytes contents(const device::Memory& memory) {
    Bytes bytes(memory.bytes.size());
    EXPECT_TRUE(stream->copy(bytes.data(), memory.bytes.data(), bytes.size()));
    EXPECT_TRUE(stream->synchronize());
    return bytes;
  }
};

TEST_F(Staged, BytesGoFromAnyMemoryToAny) {
  connect();
  std::uint64_t number = 0;
  for (const auto from : {MemoryKind::host, MemoryKind::cuda})
    for (const auto to : {MemoryKind::host, MemoryKind::cuda})
      for (const std::size_t size : {std::size_t{1}, 64 * KiB, 64 * KiB + 1, 3 * MiB + 17}) {
        SCOPED_TRACE(fmt::format("{} bytes from {} to {}", size, static_cast<int>(from), static_cast<int>(to)));
        const auto source = make(from, size + 100), target = make(to, size + 200);
        RegionId at_source = *a.engine->register_region(source.bytes, from, Access::local);
        RegionId at_target = *b.engine->register_region(target.bytes, to, Access::remote_write);
        EXPECT_EQ(b.engine->staged(at_target), to == MemoryKind::cuda);
        fill(source, 1);
        fill(target, 2);
        const Write write{.context = ++number,
                          .local = {at_source, 33},
                          .remote = {b.engine->remote(at_target), 77},
                          .length = size,
                          .notify = number};
        ASSERT_TRUE(a.engine->write(at_a, {&write, 1}));
        ASSERT_TRUE(until([&] { return a.completed.contains(number) && b.written.contains(number); }));
        EXPECT_FALSE(a.completed[number]);
        Bytes there = contents(target), here = contents(source);
        EXPECT_EQ(std::memcmp(there.data() + 77, here.data() + 33, size), 0);
        // Back again, read by the one that has just received: all around it stays as it is. What it has received was
        // pulled by it, and yet it can't read for itself until it may; and what it reads into, nobody may write to.
        fill(source, 3);
        for (const bool allowed : {false, true}) {
          const Read read{.context = ++number,
                          .local = {at_target, 50},
                          .remote = {a.engine->remote(at_source), 11},
                          .length = size};
          ASSERT_TRUE(b.engine->read(at_b, {&read, 1}));
          ASSERT_TRUE(until([&] { return b.completed.contains(number); }));
          EXPECT_EQ(b.completed[number].has_value(), !allowed);
          if (allowed) continue;
          EXPECT_EQ(contents(target), there);
          a.engine->deregister(at_source);
          b.engine->deregister(at_target);
          at_source = *a.engine->register_region(source.bytes, from, Access::remote_read);
          at_target = *b.engine->register_region(target.bytes, to, Access::local);
        }
        here = contents(source);
        std::memcpy(there.data() + 50, here.data() + 11, size);
        EXPECT_EQ(contents(target), there);
        a.engine->deregister(at_source);
        b.engine->deregister(at_target);
      }
}

TEST_F(Staged, BothSidesMaySleepUntilSomethingHappens) {
  connect();
  const auto source = make(MemoryKind::cuda, 8 * MiB), target = make(MemoryKind::cuda, 8 * MiB);
  fill(source, 5);
  const RegionId at_source = *a.engine->register_region(source.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId at_target = *b.engine->register_region(target.bytes, MemoryKind::cuda, kAnyAccess);
  const Write write{.context = 1,
                    .local = {at_source, 0},
                    .remote = {b.engine->remote(at_target), 0},
                    .length = 8 * MiB,
                    .notify = 1};
  ASSERT_TRUE(a.engine->write(at_a, {&write, 1}));
  ASSERT_NO_FATAL_FAILURE(sleep_until([&] { return a.completed.contains(1) && b.written.contains(1); }));
  EXPECT_EQ(contents(target), contents(source));
}

TEST_F(Staged, NothingLandsAfterItsRegionIsGone) {
  connect();
  const auto source = make(MemoryKind::cuda, 16 * MiB), target = make(MemoryKind::cuda, 16 * MiB);
  fill(source, 5);
  const RegionId at_source = *a.engine->register_region(source.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId at_target = *b.engine->register_region(target.bytes, MemoryKind::cuda, kAnyAccess);
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < 8; ++i)
    writes.push_back({.context = i,
                      .local = {at_source, i * 2 * MiB},
                      .remote = {b.engine->remote(at_target), i * 2 * MiB},
                      .length = 2 * MiB,
                      .notify = i});
  ASSERT_TRUE(a.engine->write(at_a, writes));
  ASSERT_TRUE(until([&] { return b.written.size() >= 2; }));
  b.engine->deregister(at_target);
  const auto then = contents(target);
  ASSERT_TRUE(until([&] { return a.completed.size() == writes.size(); }));
  EXPECT_EQ(contents(target), then);
  EXPECT_TRUE(a.completed[7]);
  // The connection is as good as before, and so are all slots.
  const RegionId again = *b.engine->register_region(target.bytes, MemoryKind::cuda, kAnyAccess);
  const Write write{.context = 100,
                    .local = {at_source, 0},
                    .remote = {b.engine->remote(again), 0},
                    .length = 16 * MiB,
                    .notify = 100};
  ASSERT_TRUE(a.engine->write(at_a, {&write, 1}));
  ASSERT_TRUE(until([&] { return a.completed.contains(100) && b.written.contains(100); }));
  EXPECT_EQ(contents(target), contents(source));
  // The poster's own region, in mid-transfer.
  const Write last{.context = 101,
                   .local = {at_source, 0},
                   .remote = {b.engine->remote(again), 0},
                   .length = 16 * MiB,
                   .notify = 101};
  ASSERT_TRUE(a.engine->write(at_a, {&last, 1}));
  a.poll();
  a.engine->deregister(at_source);
  ASSERT_TRUE(until([&] { return a.completed.contains(101); }));
  ASSERT_TRUE(a.completed[101]);
  EXPECT_EQ(a.completed[101]->code, ErrorCode::cancelled);
  EXPECT_FALSE(b.written.contains(101));
}

TEST_F(Staged, APeerThatTakesNothingDoesNotStopTheOthers) {
  connect();
  Side deaf;  // never polls
  deaf.engine = engine();
  const auto where = *deaf.engine->listen({"127.0.0.1:0"});
  a.connected = false;
  const EndpointId to_deaf = *a.engine->connect(where, {});
  ASSERT_TRUE(until([&] {
    if (deaf.accepted.empty()) deaf.poll();
    return a.connected && !deaf.accepted.empty();
  }));
  const auto source = make(MemoryKind::cuda, 4 * MiB), target = make(MemoryKind::cuda, 4 * MiB);
  fill(source, 9);
  const RegionId at_source = *a.engine->register_region(source.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId at_target = *b.engine->register_region(target.bytes, MemoryKind::cuda, kAnyAccess);
  const auto nowhere = make(MemoryKind::cuda, 4 * MiB);
  const RegionId at_deaf = *deaf.engine->register_region(nowhere.bytes, MemoryKind::cuda, kAnyAccess);
  const auto write = [&](EndpointId endpoint, const RemoteRegion& remote, std::uint64_t number) {
    const Write one{
        .context = number, .local = {at_source, 0}, .remote = {remote, 0}, .length = 4 * MiB, .notify = number};
    ASSERT_TRUE(a.engine->write(endpoint, {&one, 1}));
  };
  write(to_deaf, deaf.engine->remote(at_deaf), 1);
  write(at_a, b.engine->remote(at_target), 2);
  ASSERT_TRUE(until([&] { return a.completed.contains(2) && b.written.contains(2); }));
  EXPECT_FALSE(a.completed.contains(1));
  EXPECT_EQ(contents(target), contents(source));
  // Closed, it gives back what it held.
  a.engine->close(to_deaf);
  ASSERT_TRUE(until([&] { return a.completed.contains(1); }));
  write(at_a, b.engine->remote(at_target), 3);
  ASSERT_TRUE(until([&] { return a.completed.contains(3) && b.written.contains(3); }));
}

// Two peers that have asked for bytes and take none of them have all slots, and writes to a third wait for one.
TEST_F(Staged, WhatWaitsGoesOnWithoutAPollWhenARegionOrAnEndpointGoes) {
  slots = 2;
  connect();
  const auto where = *a.engine->listen({"127.0.0.1:0"});
  const auto memory = make(MemoryKind::cuda, 1 * MiB);
  const RegionId asked = *a.engine->register_region(memory.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId withdrawn = *a.engine->register_region(memory.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId target = *b.engine->register_region(memory.bytes, MemoryKind::cuda, kAnyAccess);
  Side still[2];
  for (Side& side : still) {
    side.engine = engine();
    const EndpointId there = *side.engine->connect(where, {});
    ASSERT_TRUE(until([&] {
      side.poll();
      return side.connected && a.accepted.size() == static_cast<std::size_t>(&side - still) + 1;
    }));
    const RegionId to = *side.engine->register_region(memory.bytes, MemoryKind::cuda, kAnyAccess);
    const Read read{.local = {to, 0}, .remote = {a.engine->remote(asked), 0}, .length = 1 * MiB};
    ASSERT_TRUE(side.engine->read(there, {&read, 1}));
    side.poll();  // the last time
    ASSERT_TRUE(side.engine->arm());
    pollfd offered{.fd = side.engine->event_fd(), .events = POLLIN, .revents = 0};
    ASSERT_TRUE(until([&] { return ::poll(&offered, 1, 0) > 0; }));
  }
  std::uint64_t number = 0;
  for (const RegionId source : {asked, withdrawn}) {
    const Write write{.context = ++number,
                      .local = {source, 0},
                      .remote = {b.engine->remote(target), 0},
                      .length = 1 * MiB,
                      .notify = number};
    ASSERT_TRUE(a.engine->write(at_a, {&write, 1}));
  }
  a.engine->deregister(withdrawn);
  EXPECT_FALSE(a.engine->arm()) << "there is a completion";
  a.poll();
  ASSERT_TRUE(a.completed.contains(2));
  EXPECT_FALSE(a.completed.contains(1));
  for (const EndpointId endpoint : a.accepted) a.engine->close(endpoint);
  ASSERT_NO_FATAL_FAILURE(sleep_until([&] { return a.completed.contains(1) && b.written.contains(1); }));
}

TEST_F(Staged, APeerThatDoesNotStageIsRefused) {
  b.engine = engine();
  const auto where = *b.engine->listen({"127.0.0.1:0"});
  a.engine = *tcp::make_engine({});
  at_a = *a.engine->connect(where, as_bytes("plain"));
  ASSERT_TRUE(until([&] { return !a.closed.empty(); }));
  EXPECT_TRUE(b.accepted.empty());
}

// What a peer that speaks the protocol wrongly can do to one that speaks it: end its own connection.
TEST_F(Staged, WrongMessagesEndTheirOwnConnectionOnly) {
  using namespace staged;
  b.engine = engine();
  const auto where = *b.engine->listen({"127.0.0.1:0"});
  const auto target = make(MemoryKind::cuda, 64 * KiB);
  const RegionId at_target = *b.engine->register_region(target.bytes, MemoryKind::cuda, kAnyAccess);
  const auto before = contents(target);
  a.engine = *tcp::make_engine({});
  const auto header = [](wire::Kind kind) { return wire::Header{.kind = kind}; };
  wire::Offer offer{.number = 1, .write = 1, .fragments = 0, .target = b.engine->remote(at_target), .length = 1};
  std::vector<std::vector<Bytes>> wrong;
  const auto hello = joined(header(wire::Kind::hello), {});
  wrong.push_back({Bytes(3)});
  wrong.push_back({joined(header(wire::Kind::message), as_bytes("no hello"))});
  wrong.push_back({hello, hello});
  wrong.push_back({hello, joined(header(static_cast<wire::Kind>(77)), {})});
  wrong.push_back({hello, joined(header(wire::Kind::offer), bytes_of(offer))});
  wrong.push_back({hello, joined(header(wire::Kind::offer), as_bytes("short"))});
  wrong.push_back({hello, joined(header(wire::Kind::landed), bytes_of(wire::Answer{.number = 12}))});
  wrong.push_back({hello, joined(header(wire::Kind::answered), bytes_of(wire::Answer{.number = 12}))});
  wrong.push_back({hello, joined(header(wire::Kind::request), {})});
  for (const auto& messages : wrong) {
    a.connected = false;
    a.closed.clear();
    const EndpointId endpoint = *a.engine->connect(where, bytes_of(wire::Greeting{}));
    ASSERT_TRUE(until([&] { return a.connected; }));
    for (const auto& message : messages) ASSERT_TRUE(a.engine->send(endpoint, message));
    ASSERT_TRUE(until([&] { return !a.closed.empty(); })) << &messages - wrong.data();
    a.engine->close(endpoint);
  }
  // An offer of bytes that can't be read is answered, and nothing has changed.
  a.connected = false;
  const EndpointId endpoint = *a.engine->connect(where, bytes_of(wire::Greeting{}));
  ASSERT_TRUE(until([&] { return a.connected; }));
  offer.fragments = 1;
  offer.write_length = 1;
  ASSERT_TRUE(a.engine->send(endpoint, hello));
  ASSERT_TRUE(a.engine->send(endpoint, joined(header(wire::Kind::offer), bytes_of(offer))));
  ASSERT_TRUE(until([&] { return a.messages > 0; }));
  EXPECT_EQ(contents(target), before);
}

TEST_F(Staged, TooFewSlotsAreRefused) {
  auto none = staged::make_engine(*tcp::make_engine({}), device, {.slot_bytes = 1 * MiB, .slots = 1});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace rejoin::transport
