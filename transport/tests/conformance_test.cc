// What every backend must do. One suite; each backend brings a Bench: engines in this process that can reach each
// other.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <random>

#include "base/fd.h"
#include "device/tests/library.h"
#include "transport/factory.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"
#include "transport/striped/factory.h"
#include "transport/tests/backends.h"

namespace rejoin::transport {
namespace {

struct Bench {
  virtual ~Bench() = default;
  virtual std::unique_ptr<Engine> engine() = 0;
  virtual void progress() {}
  virtual Address anywhere() const { return {"127.0.0.1:0"}; }
};

struct SimBench : Bench {
  VirtualClock clock;
  sim::Fabric fabric{{.seed = 7}, clock};
  std::unique_ptr<Engine> engine() override { return fabric.make_engine(); }
  void progress() override { fabric.step(); }
};

struct StripedSimBench : SimBench {
  std::unique_ptr<Engine> engine() override {
    std::vector<std::unique_ptr<Engine>> rails;
    for (int i = 0; i < 3; ++i) rails.push_back(fabric.make_engine());
    return *striped::make_engine(std::move(rails), {}, clock);
  }
};

// Over any of the others: what is registered is taken for a GPU's, which that one can't reach, and staged.
struct StagedBench : Bench {
  explicit StagedBench(std::unique_ptr<Bench> b) : below(std::move(b)) {}
  std::unique_ptr<Bench> below;
  std::unique_ptr<Engine> engine() override {
    return *staged::make_engine(below->engine(), device::test_gpu(),
                                {.slot_bytes = 64 * KiB, .slots = 4, .direct = false});
  }
  void progress() override { below->progress(); }
  Address anywhere() const override { return below->anywhere(); }
};

struct RealBench : Bench {
  explicit RealBench(std::string t) : transport(std::move(t)) {}
  std::string transport;
  std::unique_ptr<Engine> engine() override {
    auto made = make_engine(transport);
    if (!made) throw std::runtime_error(made.error().message);
    return std::move(*made);
  }
};

// An engine with what has happened to it, counted.
struct Node {
  std::unique_ptr<Engine> engine;
  Address address;
  std::vector<Event> events;
  std::vector<std::string> messages;
  std::map<std::uint64_t, int> completions;  // context → how often
  std::map<std::uint64_t, std::optional<Error>> outcome;
  std::vector<std::uint64_t> written;
  std::vector<EndpointId> connected, accepted, closed;
  std::string hello;
  std::function<void(const Event&)> on_event = [](const Event&) {};

  void poll() {
    for (const auto& event : engine->poll()) {
      switch (event.kind) {
        case EventKind::connected: connected.push_back(event.endpoint); break;
        case EventKind::accepted:
          accepted.push_back(event.endpoint);
          hello = as_text(event.message);
          break;
        case EventKind::message: messages.emplace_back(as_text(event.message)); break;
        case EventKind::written: written.push_back(event.value); break;
        case EventKind::completed:
          ++completions[event.value];
          outcome[event.value] = event.error;
          break;
        case EventKind::closed: closed.push_back(event.endpoint); break;
      }
      on_event(event);
    }
  }
};

struct Conformance : testing::TestWithParam<std::string> {
  std::unique_ptr<Bench> bench;
  std::vector<std::unique_ptr<Node>> nodes;

  MemoryKind kind = MemoryKind::host;

  static std::unique_ptr<Bench> bench_of(const std::string& backend) {
    if (backend.starts_with("staged_")) return std::make_unique<StagedBench>(bench_of(backend.substr(7)));
    if (backend == "sim") return std::make_unique<SimBench>();
    if (backend == "striped_sim") return std::make_unique<StripedSimBench>();
    return std::make_unique<RealBench>(backend);
  }
  void SetUp() override {
    bench = bench_of(GetParam());
    if (GetParam().starts_with("staged_")) kind = MemoryKind::cuda;
  }

  Node& node() {
    nodes.push_back(std::make_unique<Node>());
    nodes.back()->engine = bench->engine();
    nodes.back()->address = *nodes.back()->engine->listen(bench->anywhere());
    return *nodes.back();
  }

  // Progress until `done`; fails after a deadline that only a broken backend meets.
  [[nodiscard]] bool until(const std::function<bool()>& done, std::chrono::seconds limit = std::chrono::seconds(10)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      bench->progress();
      for (auto& n : nodes) n->poll();
    }
    return true;
  }
  void settle() {
    for (int i = 0; i < 2000; ++i) {
      bench->progress();
      for (auto& n : nodes) n->poll();
    }
  }
  void settle(Node& alone) {  // as if the others' progress threads stood still
    for (int i = 0; i < 2000; ++i) {
      bench->progress();
      alone.poll();
    }
  }

  struct Pair {
    Node &a, &b;
    EndpointId at_a, at_b;
  };
  Pair pair() {
    Node &a = node(), &b = node();
    const EndpointId at_a = *a.engine->connect(b.address, as_bytes("hello there"));
    EXPECT_TRUE(until([&] { return !a.connected.empty() && !b.accepted.empty(); }));
    return {a, b, at_a, b.accepted.at(0)};
  }
};

TEST_P(Conformance, HelloReachesTheAcceptingSide) {
  auto p = pair();
  EXPECT_EQ(p.b.hello, "hello there");
  EXPECT_EQ(p.a.connected.at(0), p.at_a);
}

TEST_P(Conformance, ConnectingToNobodyEndsInClosed) {
  Node& a = node();
  std::string nowhere;
  {
    Node gone;
    gone.engine = bench->engine();
    nowhere = gone.engine->listen(bench->anywhere())->text;
  }
  auto endpoint = a.engine->connect({nowhere}, {});
  if (!endpoint) return;  // refused at once: also an answer
  EXPECT_TRUE(until([&] { return !a.closed.empty(); }));
}

TEST_P(Conformance, MessagesArriveInOrderWhateverTheirSize) {
  auto p = pair();
  std::vector<std::string> sent;
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const std::size_t sizes[] = {1, 8, 100, 3000, 9000, 40000, Engine::kMaxMessage};
    sent.push_back(std::string(sizes[random() % 7], static_cast<char>('a' + i % 26)));
    ASSERT_TRUE(p.a.engine->send(p.at_a, as_bytes(sent.back())));
  }
  ASSERT_TRUE(until([&] { return p.b.messages.size() == sent.size(); }));
  EXPECT_EQ(p.b.messages, sent);
}

TEST_P(Conformance, MessageOverTheLimitIsRefused) {
  auto p = pair();
  auto sent = p.a.engine->send(p.at_a, Bytes(Engine::kMaxMessage + 1));
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, ErrorCode::invalid_argument);
}

TEST_P(Conformance, WritesOfEverySizeLandWholeBeforeTheirNotification) {
  auto p = pair();
  std::vector<std::uint64_t> sizes{0, 1, 7, 4096, 16 * KiB - 1, 16 * KiB, 16 * KiB + 1, 1 * MiB + 3};
#ifndef REJOIN_SANITIZED
  sizes.push_back(64 * MiB);
  // A test VM has not the memory for two of these.
  if (::sysconf(_SC_PHYS_PAGES) > 4 * static_cast<long>(GiB / 4096)) sizes.push_back(1 * GiB);
#endif
  for (auto size : sizes) {
    std::vector<std::byte> from(std::max<std::size_t>(size, 1)), to(from.size() + 64, std::byte{0xee});
    for (std::size_t i = 0; i < size; i += 61) from[i] = static_cast<std::byte>(i * 31 + size);
    const RegionId source = *p.a.engine->register_region(from, kind);
    const RegionId target = *p.b.engine->register_region(to, kind);
    bool whole = false;
    p.b.on_event = [&](const Event& event) {
      if (event.kind == EventKind::written && event.value == size)
        whole = std::memcmp(from.data(), to.data() + 16, size) == 0;
    };
    const Write write{.context = size,
                      .local = {source, 0},
                      .remote = {p.b.engine->remote(target), 16},
                      .length = size,
                      .notify = size};
    ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
    ASSERT_TRUE(until([&] { return p.a.completions[size] == 1 && !p.b.written.empty(); }, std::chrono::seconds(60)))
        << size << " bytes";
    EXPECT_TRUE(whole) << size;
    EXPECT_FALSE(p.a.outcome[size]);
    EXPECT_EQ(to[15], std::byte{0xee});
    EXPECT_EQ(to[16 + size], std::byte{0xee});
    p.b.written.clear();
    p.a.engine->deregister(source);
    p.b.engine->deregister(target);
    p.b.on_event = [](const Event&) {};
  }
}

// Memory that others can map, parts of it, and memory at the same address and of the same descriptor that is not the
// same any more.
TEST_P(Conformance, ShareableMemoryIsWhatItIsNowWhereverItLies) {
  auto p = pair();
  std::vector<std::byte> to(600 * KiB);
  const RegionId target = *p.b.engine->register_region(to, kind);
  for (int round = 0; round < 5; ++round) {
    auto memory = Mapping::shareable(1 * MiB);
    ASSERT_TRUE(memory) << memory.error().message;
    for (std::size_t i = 0; i < memory->size(); ++i)
      memory->data()[i] = static_cast<std::byte>(i * 7 + i / 4096 + round);
    const std::size_t from = 4096 * round + 24 * round, offset = 100 * round, length = 500 * KiB + round;
    const RegionId source = *p.a.engine->register_region(memory->span().subspan(from), kind);
    const auto number = static_cast<std::uint64_t>(round) + 1;
    const Write write{.context = number,
                      .local = {source, offset},
                      .remote = {p.b.engine->remote(target), offset},
                      .length = length,
                      .notify = number};
    ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
    ASSERT_TRUE(until([&] { return p.b.written.size() == number && p.a.completions[number] == 1; }));
    EXPECT_EQ(std::memcmp(to.data() + offset, memory->data() + from + offset, length), 0) << round;
    p.a.engine->deregister(source);
  }
}

TEST_P(Conformance, ManyWritesEachCompleteOnceAndNotifyOnce) {
  auto p = pair();
  constexpr std::uint64_t count = 500, size = 20 * KiB;
  std::vector<std::byte> from(size), to(count * size);
  for (std::size_t i = 0; i < size; ++i) from[i] = static_cast<std::byte>(i % 251);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < count; ++i)
    writes.push_back({.context = i,
                      .local = {source, 0},
                      .remote = {p.b.engine->remote(target), i * size},
                      .length = i % 2 == 0 ? size : 100,
                      .notify = i});
  ASSERT_TRUE(p.a.engine->write(p.at_a, writes));
  ASSERT_TRUE(until([&] { return p.a.completions.size() == count && p.b.written.size() == count; }));
  settle();
  for (auto& [context, times] : p.a.completions) EXPECT_EQ(times, 1) << context;
  EXPECT_EQ(std::set(p.b.written.begin(), p.b.written.end()).size(), count);
  for (std::uint64_t i = 0; i < count; ++i)
    EXPECT_EQ(std::memcmp(to.data() + i * size, from.data(), i % 2 == 0 ? size : 100), 0) << i;
}

TEST_P(Conformance, MessageAfterACompletionArrivesAfterTheBytes) {
  auto p = pair();
  std::vector<std::byte> from(2 * MiB, std::byte{0x5a}), to(2 * MiB);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  const Write write{.context = 1,
                    .local = {source, 0},
                    .remote = {p.b.engine->remote(target), 0},
                    .length = 2 * MiB,
                    .notify = std::nullopt};
  p.a.on_event = [&](const Event& event) {
    if (event.kind == EventKind::completed) {
      EXPECT_TRUE(p.a.engine->send(p.at_a, as_bytes("done")));
    }
  };
  bool whole = false;
  p.b.on_event = [&](const Event& event) { whole |= event.kind == EventKind::message && from == to; };
  ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
  ASSERT_TRUE(until([&] { return !p.b.messages.empty(); }));
  EXPECT_TRUE(whole);
}

TEST_P(Conformance, ReadBringsThePeersBytes) {
  auto p = pair();
  for (std::uint64_t size : {std::uint64_t{1}, 5000 * 1ul, 3 * MiB}) {
    std::vector<std::byte> here(size), there(size);
    for (std::size_t i = 0; i < size; ++i) there[i] = static_cast<std::byte>(i * 7);
    const RegionId mine = *p.a.engine->register_region(here, kind);
    const RegionId theirs = *p.b.engine->register_region(there, kind);
    const Read read{.context = size, .local = {mine, 0}, .remote = {p.b.engine->remote(theirs), 0}, .length = size};
    ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
    ASSERT_TRUE(until([&] { return p.a.completions[size] == 1; }));
    EXPECT_FALSE(p.a.outcome[size]);
    EXPECT_EQ(here, there);
    p.a.engine->deregister(mine);
    p.b.engine->deregister(theirs);
  }
}

TEST_P(Conformance, BadKeysAndRangesAreRefusedAndTouchNothing) {
  auto p = pair();
  std::vector<std::byte> from(1 * MiB, std::byte{1}), to(64 * KiB);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  const RemoteRegion good = p.b.engine->remote(target);
  const auto attempt = [&](std::uint64_t context, RemoteRange remote, std::uint64_t length) {
    const Write write{.context = context, .local = {source, 0}, .remote = remote, .length = length, .notify = 99};
    EXPECT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
    EXPECT_TRUE(until([&] { return p.a.completions[context] == 1; })) << context;
    ASSERT_TRUE(p.a.outcome[context]) << context;
    EXPECT_EQ(p.a.outcome[context]->code, ErrorCode::refused) << context;
  };
  attempt(1, {{good.key + 1, good.length}, 0}, 100);
  attempt(2, {good, 64 * KiB - 50}, 100);
  attempt(3, {{good.key, 1 * MiB}, 0}, 1 * MiB);
  attempt(4, {good, ~std::uint64_t{0} - 10}, 100);
  const Read read{.context = 5, .local = {source, 0}, .remote = {good, 60 * KiB}, .length = 64 * KiB};
  ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
  ASSERT_TRUE(until([&] { return p.a.completions[5] == 1; }));
  EXPECT_TRUE(p.a.outcome[5]);
  p.b.engine->deregister(target);
  attempt(6, {good, 0}, 100);
  EXPECT_TRUE(p.b.written.empty());
  EXPECT_TRUE(std::all_of(to.begin(), to.end(), [](std::byte b) { return b == std::byte{0}; }));
  // The endpoint is as good as before.
  ASSERT_TRUE(p.a.engine->send(p.at_a, as_bytes("still here")));
  EXPECT_TRUE(until([&] { return !p.b.messages.empty(); }));
}

TEST_P(Conformance, LocalRangesOutsideTheirRegionPostNothing) {
  auto p = pair();
  std::vector<std::byte> from(100), to(1000);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  const RemoteRange remote{p.b.engine->remote(target), 0};
  const Write writes[] = {{.context = 1, .local = {source, 0}, .remote = remote, .length = 50, .notify = 1},
                          {.context = 2, .local = {source, 60}, .remote = remote, .length = 50, .notify = 2}};
  EXPECT_FALSE(p.a.engine->write(p.at_a, writes));
  settle();
  EXPECT_TRUE(p.a.completions.empty());
  EXPECT_TRUE(p.b.written.empty());
}

TEST_P(Conformance, ClosingCompletesEverythingOnceAndFencesThePeer) {
  auto p = pair();
  constexpr std::uint64_t count = 32, size = 1 * MiB;
  std::vector<std::byte> from(size, std::byte{7}), to(count * size);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < count; ++i)
    writes.push_back({.context = i,
                      .local = {source, 0},
                      .remote = {p.b.engine->remote(target), i * size},
                      .length = size,
                      .notify = i});
  ASSERT_TRUE(p.a.engine->write(p.at_a, writes));
  ASSERT_TRUE(until([&] { return p.b.written.size() >= 3; }));
  p.b.engine->close(p.at_b);
  const auto fenced = to;
  ASSERT_TRUE(until([&] { return p.a.completions.size() == count; }));
  settle();
  EXPECT_EQ(to, fenced) << "bytes landed after close() had returned";
  for (auto& [context, times] : p.a.completions) EXPECT_EQ(times, 1) << context;
  p.a.engine->close(p.at_a);
  settle();
  for (auto& [context, times] : p.a.completions) EXPECT_EQ(times, 1) << context;
  EXPECT_FALSE(p.a.engine->send(p.at_a, as_bytes("x")));
}

TEST_P(Conformance, ThePosterMayCloseWithOperationsOutstanding) {
  auto p = pair();
  constexpr std::uint64_t count = 16, size = 4 * MiB;
  std::vector<std::byte> from(size, std::byte{7}), to(size);
  const RegionId source = *p.a.engine->register_region(from, kind);
  const RegionId target = *p.b.engine->register_region(to, kind);
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < count; ++i)
    writes.push_back(
        {.context = i, .local = {source, 0}, .remote = {p.b.engine->remote(target), 0}, .length = size, .notify = i});
  ASSERT_TRUE(p.a.engine->write(p.at_a, writes));
  p.a.engine->close(p.at_a);
  ASSERT_TRUE(until([&] { return p.a.completions.size() == count; }));
  settle();
  for (auto& [context, times] : p.a.completions) EXPECT_EQ(times, 1) << context;
  EXPECT_TRUE(until([&] { return p.b.closed.size() == 1; }));
}

// The reader moves the bytes of its reads: whatever its peer still does, memory taken back stays as it is.
TEST_P(Conformance, AReadLandsNothingInMemoryThatItsReaderHasTakenBack) {
  for (const bool closes : {true, false})
    for (const bool peer_answers : {false, true})
      for (const std::uint64_t size : {100ul, 64 * KiB, 3 * MiB}) {
        SCOPED_TRACE(fmt::format("{} bytes, {}, {}", size, closes ? "closed" : "deregistered",
                                 peer_answers ? "after the peer's answer" : "before the peer's answer"));
        auto p = pair();
        std::vector<std::byte> here(size), there(size, std::byte{0x5a});
        const RegionId mine = *p.a.engine->register_region(here, kind);
        const RegionId theirs = *p.b.engine->register_region(there, kind);
        const RemoteRange remote{p.b.engine->remote(theirs), 0};
        const Read first{.context = 1, .local = {mine, 0}, .remote = remote, .length = 1};
        ASSERT_TRUE(p.a.engine->read(p.at_a, {&first, 1}));
        ASSERT_TRUE(until([&] { return p.a.completions[1] == 1; }));  // from now on the two know each other's keys
        const Read read{.context = 2, .local = {mine, 0}, .remote = remote, .length = size};
        ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
        if (peer_answers) settle(p.b);
        if (closes) p.a.engine->close(p.at_a);
        else p.a.engine->deregister(mine);
        std::fill(here.begin(), here.end(), std::byte{0xee});
        const auto reused = here;
        settle(p.b);
        EXPECT_EQ(here, reused) << "the peer wrote into it";
        ASSERT_TRUE(until([&] { return p.a.completions[2] == 1; }));
        settle();
        EXPECT_EQ(here, reused) << "it landed later";
        EXPECT_EQ(p.a.completions[2], 1);
        p.a.engine->close(p.at_a);
        p.a.engine->deregister(mine);
        p.b.engine->deregister(theirs);
        nodes.clear();
      }
}

// A notification means the bytes that were posted, also where the poster has gone and uses its memory for others.
TEST_P(Conformance, AWriteIsNotifiedWithTheBytesThatWerePostedOrNotAtAll) {
  for (const bool closes : {true, false})
    for (const std::uint64_t size : {100ul, 64 * KiB, 3 * MiB}) {
      SCOPED_TRACE(fmt::format("{} bytes, {}", size, closes ? "closed" : "deregistered"));
      auto p = pair();
      std::vector<std::byte> from(size, std::byte{0x5a}), to(size);
      const auto posted = from;
      const RegionId source = *p.a.engine->register_region(from, kind);
      const RegionId target = *p.b.engine->register_region(to, kind);
      const Write write{
          .context = 1, .local = {source, 0}, .remote = {p.b.engine->remote(target), 0}, .length = size, .notify = 1};
      ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
      if (closes) p.a.engine->close(p.at_a);
      else p.a.engine->deregister(source);
      std::fill(from.begin(), from.end(), std::byte{0xee});
      p.b.on_event = [&](const Event& event) {
        if (event.kind == EventKind::written) EXPECT_EQ(to, posted);
      };
      settle(p.b);
      ASSERT_TRUE(until([&] { return p.a.completions[1] == 1; }));
      settle();
      p.a.engine->close(p.at_a);
      p.a.engine->deregister(source);
      p.b.engine->deregister(target);
      nodes.clear();
    }
}

// What is read is what the owner has registered now: memory that it has taken back is not read as if it were there.
TEST_P(Conformance, AReadOfMemoryThatItsOwnerHasTakenBackBringsNothingElse) {
  for (const bool maps : {true, false}) {
    auto p = pair();
    std::vector<std::byte> here(2 * MiB);
    auto shared = maps ? Mapping::shareable(here.size()) : Mapping::anonymous(here.size());
    ASSERT_TRUE(shared) << shared.error().message;
    const std::span<std::byte> there = shared->span();
    std::fill(there.begin(), there.end(), std::byte{0x5a});
    const RegionId mine = *p.a.engine->register_region(here, kind);
    const RegionId theirs = *p.b.engine->register_region(there, kind);
    const Read read{.context = 1, .local = {mine, 0}, .remote = {p.b.engine->remote(theirs), 0}, .length = here.size()};
    ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
    settle(p.b);
    p.b.engine->deregister(theirs);
    std::fill(there.begin(), there.end(), std::byte{0xee});
    ASSERT_TRUE(until([&] { return p.a.completions[1] == 1; }));
    if (!p.a.outcome[1])
      EXPECT_TRUE(std::all_of(here.begin(), here.end(), [](std::byte b) { return b == std::byte{0x5a}; }))
          << "it ended well with bytes that were never registered";
    p.a.engine->deregister(mine);
    nodes.clear();
  }
}

// Nothing of an offset or a length is kept in 32 bits. The memory is there where it is touched only.
TEST_P(Conformance, OffsetsBeyondFourGibibytesMeanWhatTheySay) {
#ifndef REJOIN_FAKE_VERBS
  if (GetParam().find("ibverbs") != std::string::npos) GTEST_SKIP() << "a device pins all of a region's memory";
#endif
  constexpr std::uint64_t border = 4 * GiB, size = border + 1 * MiB, length = 256 * KiB;
  struct Sparse {
    std::byte* at = static_cast<std::byte*>(
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ~Sparse() { ::munmap(at, size); }
    std::span<std::byte> span() const { return {at, size}; }
  } here, there;
  ASSERT_NE(here.at, MAP_FAILED);
  ASSERT_NE(there.at, MAP_FAILED);
  auto p = pair();
  const RegionId mine = *p.a.engine->register_region(here.span(), kind);
  const RegionId theirs = *p.b.engine->register_region(there.span(), kind);
  for (std::uint64_t i = 0; i < length; ++i) here.at[border - 100 + i] = static_cast<std::byte>(i % 251 + 1);
  const RemoteRange remote{p.b.engine->remote(theirs), border - 200 * KiB};
  EXPECT_EQ(remote.region.length, size);
  const Write write{
      .context = 1, .local = {mine, border - 100}, .remote = remote, .length = length, .notify = std::nullopt};
  ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
  ASSERT_TRUE(until([&] { return p.a.completions[1] == 1; }));
  EXPECT_FALSE(p.a.outcome[1]);
  EXPECT_EQ(std::memcmp(there.at + remote.offset, here.at + border - 100, length), 0);
  const Read read{.context = 2, .local = {mine, border + 512 * KiB}, .remote = remote, .length = length};
  ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
  ASSERT_TRUE(until([&] { return p.a.completions[2] == 1; }));
  EXPECT_FALSE(p.a.outcome[2]);
  EXPECT_EQ(std::memcmp(here.at + border + 512 * KiB, there.at + remote.offset, length), 0);
  // A range that would be inside if it were cut to 32 bits.
  const Read outside{.context = 3, .local = {mine, 0}, .remote = {remote.region, size - 10}, .length = length};
  ASSERT_TRUE(p.a.engine->read(p.at_a, {&outside, 1}));
  ASSERT_TRUE(until([&] { return p.a.completions[3] == 1; }));
  EXPECT_TRUE(p.a.outcome[3]);
  const Read too_long{.context = 4, .local = {mine, 0}, .remote = remote, .length = size + 1};
  EXPECT_FALSE(p.a.engine->read(p.at_a, {&too_long, 1}));
  const auto untouched = [](const std::byte* at) {
    return std::all_of(at, at + 1 * MiB, [](std::byte b) { return b == std::byte{0}; });
  };
  EXPECT_TRUE(untouched(here.at) && untouched(there.at)) << "an offset was cut to 32 bits";
  p.a.engine->deregister(mine);
  p.b.engine->deregister(theirs);
}

TEST_P(Conformance, OneEndpointsEndDisturbsNoOther) {
  Node& hub = node();
  constexpr int peers = 12;
  std::vector<Node*> spokes;
  std::vector<EndpointId> ends;
  for (int i = 0; i < peers; ++i) {
    spokes.push_back(&node());
    ends.push_back(*spokes.back()->engine->connect(hub.address, as_bytes(std::to_string(i))));
  }
  ASSERT_TRUE(until([&] {
    return hub.accepted.size() == peers &&
           std::all_of(spokes.begin(), spokes.end(), [](Node* n) { return n->connected.size() == 1; });
  }));
  for (int i = 0; i < peers; i += 2) spokes[i]->engine->close(ends[i]);
  ASSERT_TRUE(until([&] { return hub.closed.size() == peers / 2; }));
  for (int i = 1; i < peers; i += 2) ASSERT_TRUE(spokes[i]->engine->send(ends[i], as_bytes("alive")));
  EXPECT_TRUE(until([&] { return hub.messages.size() == peers / 2; }));
}

std::vector<std::string> with_staging(std::vector<std::string> names) {
  const auto below = names;
  for (const auto& name : below) {
    if (name.starts_with("ucx") || name.find_first_of(",;") == std::string::npos) names.push_back("staged_" + name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Backends, Conformance,
                         testing::ValuesIn(with_staging(with_rdma({"sim", "striped_sim", "shm", "tcp",
                                                                   "tcp:127.0.0.1,127.0.0.2", "ucx:tcp,self"}))),
                         [](const auto& backend) { return name_of(backend.param); });

}  // namespace
}  // namespace rejoin::transport
