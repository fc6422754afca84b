// Rails that die, come back, hang and deliver late, under traffic.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <random>
#include <set>

#include "base/log.h"
#include "base/sanitized.h"
#include "transport/factory.h"
#include "transport/tests/same_bytes.h"
#include "transport/tests/striped_cluster.h"

namespace rejoin::transport::striped {
namespace {

// Both sides write and send while rails are cut at random, one at a time with some time to come back.
void survive(std::uint64_t seed) {
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  Cluster c(seed, 2 + static_cast<int>(seed % 2));
  c.laziness = seed % 3 == 0 ? 16 : 1;
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
    flow.source_region = *flow.from.engine->register_region(flow.source, MemoryKind::host, kAnyAccess);
    flow.target_region = *flow.to.engine->register_region(flow.target, MemoryKind::host, kAnyAccess);
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
      next_cut = c.clock.now() + std::chrono::microseconds(4000 + random() % 4000) * (c.laziness == 1 ? 1 : 4);
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
  constexpr std::uint64_t seeds = kSanitized ? 3 : 60;
  for (std::uint64_t seed = 1; seed <= seeds && !testing::Test::HasFailure(); ++seed) survive(seed);
}

// Who is notified may use the memory for something else at once: a piece whose rail died between landing and its
// completion is not written there again.
TEST(Striped, NothingOfAWriteLandsAfterItsNotificationWhileRailsAreCut) {
  constexpr std::size_t writes = 2000, bytes = 8 * KiB;
  constexpr int seeds = kSanitized ? 5 : 20;
  int cuts = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Cluster c(seed);
    ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
    std::vector<std::byte> source(bytes, std::byte{1}), target(writes * bytes);
    const auto from = *c.a.engine->register_region(source, MemoryKind::host, kAnyAccess);
    const auto to = c.b.engine->remote(*c.b.engine->register_region(target, MemoryKind::host, kAnyAccess));
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
  EXPECT_GT(cuts, 2 * seeds);
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
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
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
    EXPECT_TRUE(same_bytes(from, to));
  }
  EXPECT_FALSE(a.closed || b.closed);
}

// It takes connections and says nothing, as where the way there goes in the middle of a greeting. Nothing but the time
// wakes who waits for it.
TEST(Striped, ATcpRailThatDoesNotAnswerIsTriedAgain) {
  spdlog::set_level(spdlog::level::err);
  const Fd mute(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {::inet_addr("127.0.0.2")}, .sin_zero = {}};
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(mute.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(mute.get(), 8), 0);
  ASSERT_EQ(::getsockname(mute.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  Side a, b;
  for (Side* side : {&a, &b}) {
    side->engine = *transport::make_engine("tcp:127.0.0.1,127.0.0.2");
    side->engine->set_silence(std::chrono::milliseconds(200));
  }
  const std::string there = b.engine->listen({"0.0.0.0:0"})->text;
  const std::string other = fmt::format("{}|127.0.0.2:{}", there.substr(0, there.find('|')), ntohs(address.sin_port));
  a.endpoint = *a.engine->connect({other}, {});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!a.up && std::chrono::steady_clock::now() < deadline) a.poll(), b.poll();
  ASSERT_TRUE(a.up);
  std::vector<Fd> taken;
  while (taken.size() < 3 && std::chrono::steady_clock::now() < deadline) {
    a.poll();
    if (Fd one{::accept4(mute.get(), nullptr, nullptr, SOCK_CLOEXEC)}) taken.push_back(std::move(one));
    pollfd waiting{a.engine->event_fd(), POLLIN, 0};
    if (a.engine->arm()) ASSERT_EQ(::poll(&waiting, 1, 15000), 1) << "nothing wakes it";
  }
  EXPECT_EQ(taken.size(), 3u) << "so often it has been tried";
  EXPECT_FALSE(a.closed);
}

}  // namespace
}  // namespace rejoin::transport::striped
