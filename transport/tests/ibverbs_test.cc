// What only real RDMA devices show: links that go down, devices that go away, regions withdrawn under traffic. Runs
// where REJOIN_RDMA names two devices on links v0 and v1, as the VM rig does; elsewhere the tests are skipped.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>

#include "base/log.h"
#include "transport/factory.h"
#include "transport/ibverbs/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/backends.h"

namespace rejoin::transport {
namespace {

void shell(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

std::uint64_t packets_sent(const std::string& device) {
  std::ifstream in("/sys/class/infiniband/" + device + "/ports/1/hw_counters/sent_pkts");
  std::uint64_t count = 0;
  in >> count;
  return count;
}

struct Side {
  std::unique_ptr<Engine> engine;
  Address address;
  EndpointId endpoint;
  bool up = false, closed = false;
  std::vector<std::string> messages;
  std::vector<std::uint64_t> written;
  std::map<std::uint64_t, std::optional<Error>> completed;
  std::optional<Error> why;

  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted) endpoint = event.endpoint;
      if (event.kind == EventKind::accepted || event.kind == EventKind::connected) up = true;
      if (event.kind == EventKind::message) messages.emplace_back(as_text(event.message));
      if (event.kind == EventKind::written) written.push_back(event.value);
      if (event.kind == EventKind::closed) closed = true, why = event.error;
      if (event.kind != EventKind::completed) continue;
      EXPECT_FALSE(completed.contains(event.value)) << "completed twice: " << event.value;
      completed[event.value] = event.error;
    }
  }
};

struct IbverbsRails : testing::Test {
  Side a, b;

  void SetUp() override {
    if (!has_rdma()) GTEST_SKIP() << "no RDMA devices here; './run vm test' brings its own";
    spdlog::set_level(spdlog::level::err);
    for (const char* rail : {"0", "1"}) shell(fmt::format("/usr/bin/ip link set v{} up", rail));
  }
  void connect(const std::string& transport) {
    for (Side* side : {&a, &b}) {
      auto made = make_engine(transport);
      ASSERT_TRUE(made) << made.error().message;
      side->engine = std::move(*made);
    }
    a.endpoint = *a.engine->connect(*b.engine->listen({"0.0.0.0:0"}), {});
    ASSERT_TRUE(until([&] { return a.up && b.up; }));
  }
  [[nodiscard]] bool until(const std::function<bool()>& done, std::chrono::seconds limit = std::chrono::seconds(40)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      a.poll();
      b.poll();
    }
    return true;
  }
};

constexpr std::uint64_t kSent = 24 * MiB;

struct Transfer {
  std::vector<std::byte> from = std::vector<std::byte>(kSent), to = std::vector<std::byte>(kSent);
  RegionId source, target;
  Transfer(Side& a, Side& b) {
    for (std::size_t i = 0; i < kSent; i += 8) std::memcpy(from.data() + i, &i, 8);
    source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  }
  Result<> write(Side& a, Side& b, std::uint64_t context) {
    std::fill(to.begin(), to.end(), std::byte{0});
    const Write write{.context = context,
                      .local = {source, 0},
                      .remote = {b.engine->remote(target), 0},
                      .length = kSent,
                      .notify = context};
    return a.engine->write(a.endpoint, {&write, 1});
  }
  bool begun() const { return to[8] != std::byte{0}; }
};

TEST_F(IbverbsRails, ALinkSetDownUnderARunningWriteCostsNothingAndIsUsedAgainWhenItComesBack) {
  connect("ibverbs:rxe0,rxe1");
  Transfer transfer(a, b);
  for (std::uint64_t round = 1; round <= 2; ++round) {
    ASSERT_TRUE(transfer.write(a, b, round));
    ASSERT_TRUE(until([&] { return transfer.begun(); }));
    shell("/usr/bin/ip link set v1 down");
    ASSERT_TRUE(until([&] { return a.completed.contains(round) && b.written.size() == round; }));
    EXPECT_FALSE(a.completed[round]) << a.completed[round]->message;
    EXPECT_EQ(transfer.from, transfer.to);
    shell("/usr/bin/ip link set v1 up");
    const std::uint64_t before = packets_sent("rxe1");
    std::uint64_t extra = 100 * round;
    ASSERT_TRUE(until([&] {  // some traffic until the rail carries a good part of it again
      if (extra == 100 * round || a.completed.contains(extra)) EXPECT_TRUE(transfer.write(a, b, ++extra));
      return packets_sent("rxe1") > before + kSent / 4096 / 4;
    })) << "the rail is not used again";
    ASSERT_TRUE(until([&] { return a.completed.contains(extra) && b.written.back() == extra; }));
    EXPECT_EQ(transfer.from, transfer.to);
    b.written.resize(round);
  }
  EXPECT_FALSE(a.closed || b.closed);
}

TEST_F(IbverbsRails, AGidThatMovedToAnotherIndexIsFoundAgain) {
  connect("ibverbs:rxe0,rxe1");
  Transfer transfer(a, b);
  const std::string ip = "/usr/bin/ip ";
  // Another address takes the GID's place while the link is down.
  shell(ip + "link set v1 down; " + ip + "addr del 10.77.1.1/24 dev v1; " + ip + "link set v1 up; " + ip +
        "addr add 10.99.0.1/24 dev v1; " + ip + "addr add 10.77.1.1/24 dev v1");
  const std::uint64_t before = packets_sent("rxe1");
  std::uint64_t round = 0;
  ASSERT_TRUE(until([&] {
    if (round == 0 || a.completed.contains(round)) EXPECT_TRUE(transfer.write(a, b, ++round));
    return packets_sent("rxe1") > before + kSent / 4096 / 4;
  })) << "the rail is not used again";
  ASSERT_TRUE(until([&] { return a.completed.contains(round) && b.written.back() == round; }));
  EXPECT_FALSE(a.completed[round]);
  EXPECT_EQ(transfer.from, transfer.to);
  a.engine.reset(), b.engine.reset();
  shell(ip + "addr del 10.99.0.1/24 dev v1");
}

TEST_F(IbverbsRails, BothLinksDownIsAnErrorThatNamesTheRail) {
  connect("ibverbs:rxe0,rxe1");
  Transfer transfer(a, b);
  ASSERT_TRUE(transfer.write(a, b, 1));
  ASSERT_TRUE(until([&] { return transfer.begun(); }));
  shell("/usr/bin/ip link set v0 down; /usr/bin/ip link set v1 down");
  ASSERT_TRUE(until([&] { return a.closed && b.closed; }, std::chrono::seconds(20)));
  ASSERT_TRUE(a.completed[1]);
  EXPECT_NE(a.why->message.find("rail rxe"), std::string::npos) << a.why->message;
}

// Each way of connecting, since the queue pairs are connected anew many times.
struct IbverbsRebuilding : IbverbsRails, testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Connecting, IbverbsRebuilding,
                         testing::Values("ibverbs:rxe0;qps=3", "ibverbs:rxe0;qps=3;cm=auto"),
                         [](const auto& instance) { return instance.index == 0 ? "exchange" : "rdma_cm"; });

TEST_P(IbverbsRebuilding, RegionsWithdrawnUnderTrafficRefuseTheirWritesAndNothingElse) {
  connect(GetParam());
  std::vector<std::byte> from(64 * KiB, std::byte{3}), lasting(256 * KiB), passing(256 * KiB);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId back = *b.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(lasting, MemoryKind::host, kAnyAccess);
  const RegionId target_back = *a.engine->register_region(lasting, MemoryKind::host, kAnyAccess);
  std::uint64_t context = 0, refused = 0;
  std::vector<std::string> said;
  for (int round = 0; round < 30; ++round) {
    const RegionId brief = *b.engine->register_region(passing, MemoryKind::host, kAnyAccess);
    const RemoteRegion key = b.engine->remote(brief);
    std::vector<std::uint64_t> doubtful, sound, sound_back;
    const auto write = [&](Side& side, RegionId local, const RemoteRegion& remote, std::vector<std::uint64_t>& list) {
      list.push_back(++context);
      const Write one{
          .context = context, .local = {local, 0}, .remote = {remote, 0}, .length = 64 * KiB, .notify = context};
      ASSERT_TRUE(side.engine->write(side.endpoint, {&one, 1}));
    };
    for (int i = 0; i < 12; ++i) {
      write(a, source, key, doubtful);
      write(a, source, b.engine->remote(target), sound);
      write(b, back, a.engine->remote(target_back), sound_back);
      said.push_back(fmt::format("{} {}", round, i));
      ASSERT_TRUE(a.engine->send(a.endpoint, as_bytes(said.back())));
    }
    for (int i = 0; i < round * 3; ++i) a.poll(), b.poll();
    b.engine->deregister(brief);
    ASSERT_TRUE(until([&] {
      return a.completed.size() == doubtful.size() + sound.size() && b.completed.size() == sound_back.size() &&
             b.messages.size() == said.size();
    })) << "round "
        << round << ": " << a.completed.size() << ", " << b.completed.size() << ", " << b.messages.size();
    for (auto one : sound) EXPECT_FALSE(a.completed[one]) << a.completed[one]->message;
    for (auto one : sound_back) EXPECT_FALSE(b.completed[one]) << b.completed[one]->message;
    for (auto one : doubtful) {
      if (!a.completed[one]) continue;
      ++refused;
      EXPECT_EQ(a.completed[one]->code, ErrorCode::refused) << a.completed[one]->message;
    }
    a.completed.clear(), b.completed.clear();
    ASSERT_FALSE(a.closed || b.closed) << a.why->message;
  }
  EXPECT_EQ(b.messages, said);
  EXPECT_EQ(std::set(b.written.begin(), b.written.end()).size(), b.written.size()) << "a notification came twice";
  EXPECT_GT(refused, 0u);
}

TEST_F(IbverbsRails, APeerThatDoesNotReadIsSlowNotDead) {
  connect("ibverbs:rxe0");
  std::vector<std::string> said;
  for (int i = 0; i < 3000; ++i) {  // several times the receive buffers
    said.push_back(fmt::format("{} {}", i, std::string(static_cast<std::size_t>(i % 500), 'x')));
    ASSERT_TRUE(a.engine->send(a.endpoint, as_bytes(said.back())));
  }
  const auto until_then = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (std::chrono::steady_clock::now() < until_then) a.poll();
  EXPECT_FALSE(a.closed);
  ASSERT_TRUE(until([&] { return b.messages.size() == said.size(); }));
  EXPECT_EQ(b.messages, said);
}

TEST_F(IbverbsRails, ADeviceThatIsRemovedIsLetGoAndUsedAgainWhenItIsBack) {
  connect("ibverbs:rxe0,rxe1");
  Transfer transfer(a, b);
  ASSERT_TRUE(transfer.write(a, b, 1));
  ASSERT_TRUE(until([&] { return transfer.begun(); }));
  shell("( rdma link delete rxe1; echo gone >/tmp/removed ) &");  // it waits until nobody has the device open
  ASSERT_TRUE(until([&] { return a.completed.contains(1) && b.written.size() == 1; }));
  EXPECT_FALSE(a.completed[1]) << a.completed[1]->message;
  EXPECT_EQ(transfer.from, transfer.to);
  ASSERT_TRUE(until([&] { return std::ifstream("/tmp/removed").good(); })) << "somebody holds on to the device";
  shell("rdma link add rxe1 type rxe netdev v1");
  std::uint64_t round = 1;
  ASSERT_TRUE(until([&] {
    if (a.completed.contains(round)) EXPECT_TRUE(transfer.write(a, b, ++round));
    return packets_sent("rxe1") > kSent / 4096 / 4;
  })) << "the rail is not used again";
  ASSERT_TRUE(until([&] { return a.completed.contains(round) && b.written.back() == round; }));
  EXPECT_FALSE(a.completed[round]);
  EXPECT_EQ(transfer.from, transfer.to);
  EXPECT_FALSE(a.closed || b.closed);
}

TEST_F(IbverbsRails, WhatIsNoDmaBufOrCantBeRegisteredIsRefusedWithTheReason) {
  auto engine = make_engine("ibverbs:rxe0");
  ASSERT_TRUE(engine) << engine.error().message;
  std::vector<std::byte> memory(64 * KiB);
  const auto refused = (*engine)->register_dma_buf({.fd = STDIN_FILENO, .offset = 0, .memory = memory}, kAnyAccess);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::unreachable);
  EXPECT_NE(refused.error().message.find("dma-buf"), std::string::npos) << refused.error().message;
  fmt::print("{}\n", refused.error().message);
}

TEST(Ibverbs, AProgramThatForksKeepsThePagesThatAreRegistered) {
  if (!ibverbs::available()) GTEST_SKIP() << "no libibverbs here";
  void* library = ::dlopen("libibverbs.so.1", RTLD_NOW);
  ASSERT_NE(library, nullptr);
  using State = ibv_fork_status (*)();
  const auto state = reinterpret_cast<State>(::dlsym(library, "ibv_is_fork_initialized"));
  if (state == nullptr) GTEST_SKIP() << "this libibverbs doesn't tell";
  EXPECT_NE(state(), IBV_FORK_DISABLED);
}

TEST(Ibverbs, WrongNamesAndSettingsAreNamed) {
  const auto why = [](const std::string& name) {
    auto made = make_engine(name);
    return made ? "it was made" : made.error().message;
  };
  EXPECT_NE(why("ibverbs:mlx5_0;qps=99").find("settings are gid"), std::string::npos);
  EXPECT_NE(why("ibverbs:mlx5_0;nonsense").find("'nonsense' of rail"), std::string::npos);
  EXPECT_NE(why("ibverbs:mlx5_0:x").find("no number"), std::string::npos);
  const std::string none = why("ibverbs:no_such_device");
  EXPECT_TRUE(none.find("no RDMA device") != std::string::npos) << none;
}

}  // namespace
}  // namespace rejoin::transport
