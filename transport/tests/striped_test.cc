// Rails that die, come back, hang and deliver late, under traffic.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <random>

#include "base/log.h"
#include "transport/factory.h"
#include "transport/sim/fabric.h"
#include "transport/striped/factory.h"

namespace rejoin::transport::striped {
namespace {

constexpr Options kOptions{.largest_piece = 4 * KiB,
                           .smallest_piece = 1 * KiB,
                           .bytes_in_flight = 16 * KiB,
                           .stall = std::chrono::milliseconds(5),
                           .first_retry = std::chrono::microseconds(300),
                           .longest_retry = std::chrono::milliseconds(2)};

struct Side {
  std::vector<Engine*> rails;
  std::unique_ptr<Engine> engine;
  std::vector<std::string> messages;
  std::vector<std::uint64_t> written;
  std::map<std::uint64_t, std::optional<Error>> completed;
  EndpointId endpoint;
  bool up = false, closed = false;
  std::function<void(const Event&)> on_event = [](const Event&) {};

  void poll() {
    for (const auto& event : engine->poll()) {
      switch (event.kind) {
        case EventKind::connected: up = true; break;
        case EventKind::accepted:
          endpoint = event.endpoint;
          up = true;
          break;
        case EventKind::message: messages.emplace_back(as_text(event.message)); break;
        case EventKind::written: written.push_back(event.value); break;
        case EventKind::completed:
          EXPECT_FALSE(completed.contains(event.value)) << "completed twice: " << event.value;
          completed[event.value] = event.error;
          break;
        case EventKind::closed: closed = true; break;
      }
      on_event(event);
    }
  }
};

struct Cluster {
  VirtualClock clock;
  sim::Fabric fabric;
  Side a, b;

  explicit Cluster(std::uint64_t seed, int rails = 2)
      : fabric({.seed = seed, .detection = std::chrono::microseconds(500), .late_writes = true}, clock) {
    for (Side* side : {&a, &b}) {
      std::vector<std::unique_ptr<Engine>> engines;
      for (int i = 0; i < rails; ++i) {
        engines.push_back(fabric.make_engine());
        side->rails.push_back(engines.back().get());
      }
      side->engine = *make_engine(std::move(engines), kOptions, clock);
    }
    const Address address = *b.engine->listen({"sim"});
    a.endpoint = *a.engine->connect(address, as_bytes("hi"));
  }

  void turn() {
    if (!fabric.step() || fabric.next_event() > clock.now() + std::chrono::milliseconds(1))
      clock.advance(std::chrono::microseconds(100));
    a.poll();
    b.poll();
  }
  [[nodiscard]] bool until(const std::function<bool()>& done) {
    for (int i = 0; i < 400000; ++i) {
      if (done()) return true;
      turn();
    }
    return false;
  }
};

// Both sides write and send while rails are cut at random, one at a time with some time to come back.
void survive(std::uint64_t seed) {
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  Cluster c(seed, 2 + static_cast<int>(seed % 2));
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));

  constexpr std::size_t slots = 4, slot_bytes = 24 * KiB, rounds = 300;
  struct Flow {
    Side &from, &to;
    std::vector<std::byte> source, target;
    RegionId source_region, target_region;
    std::uint64_t posted = 0;
    std::vector<std::uint64_t> busy = std::vector<std::uint64_t>(slots);  // context + 1 of the write under way
    std::vector<TimePoint> rest = std::vector<TimePoint>(slots);          // until when nothing new is written there
    std::vector<std::string> said;
  };
  std::vector<Flow> flows;
  flows.push_back({c.a, c.b, std::vector<std::byte>(slots * slot_bytes), std::vector<std::byte>(slots * slot_bytes)});
  flows.push_back({c.b, c.a, std::vector<std::byte>(slots * slot_bytes), std::vector<std::byte>(slots * slot_bytes)});
  for (auto& flow : flows) {
    flow.source_region = *flow.from.engine->register_region(flow.source, MemoryKind::host);
    flow.target_region = *flow.to.engine->register_region(flow.target, MemoryKind::host);
  }
  TimePoint next_cut = c.clock.now() + std::chrono::milliseconds(2);
  int cuts = 0;
  const auto over = [&] {
    return std::all_of(flows.begin(), flows.end(), [&](const Flow& flow) {
      return flow.from.completed.size() == rounds * slots && flow.to.written.size() == rounds * slots &&
             flow.to.messages.size() == flow.said.size();
    });
  };
  const auto drive = [&] {
    for (auto& flow : flows) {
      for (std::size_t slot = 0; slot < slots && flow.posted < rounds * slots; ++slot) {
        auto& busy = flow.busy[slot];
        if (busy != 0) {
          if (!flow.from.completed.contains(busy - 1)) continue;
          // Odd ones are left alone for a while: what was on a dead rail must not change these bytes any more.
          if (flow.rest[slot] == TimePoint{} && busy % 2 == 0)
            flow.rest[slot] = c.clock.now() + std::chrono::microseconds(600);
          if (c.clock.now() < flow.rest[slot]) continue;
          flow.rest[slot] = TimePoint{};
          EXPECT_FALSE(flow.from.completed[busy - 1]) << flow.from.completed[busy - 1]->message;
          EXPECT_EQ(
              std::memcmp(flow.source.data() + slot * slot_bytes, flow.target.data() + slot * slot_bytes, slot_bytes),
              0);
        }
        const std::uint64_t context = flow.posted++;
        for (std::size_t i = 0; i < slot_bytes; i += 8)
          std::memcpy(flow.source.data() + slot * slot_bytes + i, &context, sizeof context);
        const Write write{.context = context,
                          .local = {flow.source_region, slot * slot_bytes},
                          .remote = {flow.to.engine->remote(flow.target_region), slot * slot_bytes},
                          .length = slot_bytes,
                          .notify = context};
        ASSERT_TRUE(flow.from.engine->write(flow.from.endpoint, {&write, 1}));
        busy = context + 1;
        flow.said.push_back(fmt::format("message {} {}", context, std::string(random() % 300, 'x')));
        ASSERT_TRUE(flow.from.engine->send(flow.from.endpoint, as_bytes(flow.said.back())));
      }
    }
    if (c.clock.now() >= next_cut && cuts < 100) {
      ++cuts;
      Side& side = random() % 2 == 0 ? c.a : c.b;
      c.fabric.cut(*side.rails[random() % side.rails.size()]);
      next_cut = c.clock.now() + std::chrono::microseconds(4000 + random() % 4000);
    }
  };
  ASSERT_TRUE(c.until([&] {
    drive();
    return testing::Test::HasFatalFailure() || over();
  }));
  EXPECT_GT(cuts, 5);
  for (auto& flow : flows) {
    EXPECT_EQ(std::set(flow.to.written.begin(), flow.to.written.end()).size(), rounds * slots);
    EXPECT_EQ(flow.to.messages, flow.said);
  }
  EXPECT_FALSE(c.a.closed || c.b.closed);
  EXPECT_EQ(flows[0].source, flows[0].target);
  EXPECT_EQ(flows[1].source, flows[1].target);
}

TEST(Striped, EverythingArrivesOnceAndWholeWhileRailsAreCut) {
  spdlog::set_level(spdlog::level::err);
  for (std::uint64_t seed = 1; seed <= 60 && !testing::Test::HasFailure(); ++seed) survive(seed);
}

// Who is notified may use the memory for something else at once: a piece whose rail died between landing and its
// completion is not written there again.
TEST(Striped, NothingOfAWriteLandsAfterItsNotificationWhileRailsAreCut) {
  constexpr std::size_t writes = 2000, bytes = 8 * KiB;
  int cuts = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Cluster c(seed);
    ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
    std::vector<std::byte> source(bytes, std::byte{1}), target(writes * bytes);
    const auto from = *c.a.engine->register_region(source, MemoryKind::host);
    const auto to = c.b.engine->remote(*c.b.engine->register_region(target, MemoryKind::host));
    const std::vector<std::byte> reused(bytes, std::byte{2});
    c.b.on_event = [&](const Event& event) {
      if (event.kind == EventKind::written)
        std::copy(reused.begin(), reused.end(), target.begin() + static_cast<std::ptrdiff_t>(event.value * bytes));
    };
    std::uint64_t posted = 0;
    TimePoint next_cut = c.clock.now() + std::chrono::milliseconds(5);
    ASSERT_TRUE(c.until([&] {
      for (; posted < writes && posted < c.a.completed.size() + 4; ++posted) {
        const Write write{
            .context = posted, .local = {from, 0}, .remote = {to, posted * bytes}, .length = bytes, .notify = posted};
        EXPECT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
      }
      if (c.clock.now() >= next_cut) {
        next_cut = c.clock.now() + std::chrono::microseconds(5000 + random() % 3000);  // the other is back by then
        c.fabric.cut(*c.a.rails[random() % 2]);
        ++cuts;
      }
      return c.a.completed.size() == writes && c.b.written.size() == writes;
    }));
    for (std::size_t i = 0; i < writes; ++i)
      ASSERT_EQ(std::memcmp(target.data() + i * bytes, reused.data(), bytes), 0) << "write " << i;
  }
  EXPECT_GT(cuts, 40);
}

TEST(Striped, TheEndpointFailsWithItsLastRailOnly) {
  Cluster c(3);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> bytes(64 * KiB);
  const RegionId source = *c.a.engine->register_region(bytes, MemoryKind::host);
  const RegionId target = *c.b.engine->register_region(bytes, MemoryKind::host);
  const Write write{
      .context = 7, .local = {source, 0}, .remote = {c.b.engine->remote(target), 0}, .length = 64 * KiB, .notify = 7};
  ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
  c.fabric.cut(*c.a.rails[0]);
  c.a.poll();
  EXPECT_FALSE(c.a.closed);
  c.fabric.cut(*c.a.rails[1]);
  ASSERT_TRUE(c.until([&] { return c.a.closed && c.b.closed; }));
  ASSERT_TRUE(c.a.completed.contains(7));
  EXPECT_TRUE(c.a.completed[7]);
  EXPECT_TRUE(c.b.written.empty());
}

TEST(Striped, ARailThatHangsIsTakenOutAndItsPiecesGoOverTheOthers) {
  Cluster c(5);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(256 * KiB, std::byte{9}), to(256 * KiB);
  const RegionId source = *c.a.engine->register_region(from, MemoryKind::host);
  const RegionId target = *c.b.engine->register_region(to, MemoryKind::host);
  c.fabric.stop(*c.b.rails[1]);  // it takes everything and does nothing
  for (std::uint64_t i = 0; i < 50; ++i) {
    const Write write{.context = i,
                      .local = {source, 0},
                      .remote = {c.b.engine->remote(target), 0},
                      .length = 256 * KiB,
                      .notify = i};
    ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
    ASSERT_TRUE(c.until([&] { return c.a.completed.contains(i); })) << i;
    EXPECT_FALSE(c.a.completed[i]);
  }
  EXPECT_EQ(from, to);
  EXPECT_FALSE(c.a.closed);
}

// As a flush has to be: behind what any rail has written.
TEST(Striped, AReadOnEachRailWaitsForEachThatIsUp) {
  Cluster c(8);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(64, std::byte{9}), to(64);
  const RegionId source = *c.b.engine->register_region(from, MemoryKind::host);
  const RegionId target = *c.a.engine->register_region(to, MemoryKind::host);
  std::uint64_t context = 0;
  const auto read = [&] {
    const Read one{.context = ++context,
                   .local = {target, 0},
                   .remote = {c.b.engine->remote(source), 0},
                   .length = 1,
                   .on_each_rail = true};
    EXPECT_TRUE(c.a.engine->read(c.a.endpoint, {&one, 1}));
    return context;
  };
  const auto first = read();
  ASSERT_TRUE(c.until([&] { return c.a.completed.contains(first); }));
  EXPECT_FALSE(c.a.completed[first]);
  EXPECT_EQ(to[0], std::byte{9});
  for (auto* rail : c.b.rails) {
    c.fabric.stop(*rail);
    const auto next = read();
    const TimePoint before = c.clock.now();
    while (c.clock.now() - before < kOptions.stall / 4) c.turn();
    EXPECT_FALSE(c.a.completed.contains(next)) << "one of them has not answered";
    c.fabric.resume(*rail);
    ASSERT_TRUE(c.until([&] { return c.a.completed.contains(next); }));
    EXPECT_FALSE(c.a.completed[next]);
  }
  c.fabric.cut(*c.a.rails[1]);
  const auto last = read();
  ASSERT_TRUE(c.until([&] { return c.a.completed.contains(last); }));
  EXPECT_FALSE(c.a.completed[last]) << "who is down writes nothing";
}

// The sockets of this process that are connected from `address`.
std::vector<int> sockets_from(const std::string& address) {
  std::vector<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in local{}, peer{};
    socklen_t length = sizeof local, peer_length = sizeof peer;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0 || local.sin_family != AF_INET) continue;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) continue;
    if (local.sin_addr.s_addr == ::inet_addr(address.c_str())) found.push_back(fd);
  }
  return found;
}

TEST(Striped, ATcpRailCutInMidTransferCostsNothingAndComesBack) {
  spdlog::set_level(spdlog::level::err);
  Side a, b;
  for (Side* side : {&a, &b}) side->engine = *transport::make_engine("tcp:127.0.0.1,127.0.0.2");
  a.endpoint = *a.engine->connect(*b.engine->listen({"0.0.0.0:0"}), {});
  const auto until = [&](const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done() && std::chrono::steady_clock::now() < deadline) {
      a.poll();
      b.poll();
    }
    return done();
  };
  constexpr std::uint64_t size = 64 * MiB;
  std::vector<std::byte> from(size), to(size);
  for (std::size_t i = 0; i < size; i += 8) std::memcpy(from.data() + i, &i, 8);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host);
  for (std::uint64_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(until([&] { return a.up && b.up && sockets_from("127.0.0.2").size() == 2; })) << "rail 1 is not up";
    std::fill(to.begin(), to.end(), std::byte{0});
    const Write write{.context = round,
                      .local = {source, 0},
                      .remote = {b.engine->remote(target), 0},
                      .length = size,
                      .notify = round};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
    ASSERT_TRUE(until([&] { return to[size / 2] != std::byte{0} || to[size / 2 + 8] != std::byte{0}; }));
    for (int fd : sockets_from("127.0.0.2")) ::shutdown(fd, SHUT_RDWR);
    ASSERT_TRUE(until([&] { return a.completed.contains(round) && b.written.size() == round + 1; }));
    EXPECT_FALSE(a.completed[round]);
    EXPECT_EQ(from, to);
  }
  EXPECT_FALSE(a.closed || b.closed);
}

TEST(Striped, OtherCountsOfRailsUseWhatBothHave) {
  VirtualClock clock;
  sim::Fabric fabric({}, clock);
  const auto make = [&](int rails) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < rails; ++i) engines.push_back(fabric.make_engine());
    return *make_engine(std::move(engines), kOptions, clock);
  };
  auto a = make(3), b = make(2);
  const EndpointId endpoint = *a->connect(*b->listen({"sim"}), {});
  std::vector<std::byte> from(100 * KiB, std::byte{3}), to(100 * KiB);
  const RegionId source = *a->register_region(from, MemoryKind::host),
                 target = *b->register_region(to, MemoryKind::host);
  bool done = false;
  for (int i = 0; i < 10000 && !done; ++i) {
    if (!fabric.step()) clock.advance(std::chrono::microseconds(100));
    for (const auto& event : a->poll()) {
      if (event.kind == EventKind::connected) {
        const Write write{
            .context = 1, .local = {source, 0}, .remote = {b->remote(target), 0}, .length = 100 * KiB, .notify = 1};
        ASSERT_TRUE(a->write(endpoint, {&write, 1}));
      }
      done |= event.kind == EventKind::completed && !event.error;
    }
    b->poll();
  }
  EXPECT_TRUE(done);
  EXPECT_EQ(from, to);
}

TEST(Striped, NoRailsOrTooManyAreRefused) {
  VirtualClock clock;
  sim::Fabric fabric({}, clock);
  EXPECT_FALSE(make_engine({}, {}, clock));
  std::vector<std::unique_ptr<Engine>> many;
  for (int i = 0; i < 17; ++i) many.push_back(fabric.make_engine());
  auto made = make_engine(std::move(many), {}, clock);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("1 to 16"), std::string::npos);
}

}  // namespace
}  // namespace rejoin::transport::striped
