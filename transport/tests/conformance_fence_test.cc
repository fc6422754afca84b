// What every backend must do: what is closed or taken back is fenced, and every operation under way ends once.
#include <fmt/format.h>

#include <algorithm>

#include "base/fd.h"
#include "transport/tests/conformance.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

TEST_P(Conformance, ClosingCompletesEverythingOnceAndFencesThePeer) {
  auto p = pair();
  constexpr std::uint64_t count = 32, size = 1 * MiB;
  std::vector<std::byte> from(size, std::byte{7}), to(count * size);
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
  EXPECT_TRUE(same_bytes(to, fenced)) << "bytes landed after close() had returned";
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
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
        const RegionId mine = *p.a.engine->register_region(here, kind, kAnyAccess);
        const RegionId theirs = *p.b.engine->register_region(there, kind, kAnyAccess);
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
        EXPECT_TRUE(same_bytes(here, reused)) << "the peer wrote into it";
        ASSERT_TRUE(until([&] { return p.a.completions[2] == 1; }));
        settle();
        EXPECT_TRUE(same_bytes(here, reused)) << "it landed later";
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
      const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
      const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
      const Write write{
          .context = 1, .local = {source, 0}, .remote = {p.b.engine->remote(target), 0}, .length = size, .notify = 1};
      ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
      if (closes) p.a.engine->close(p.at_a);
      else p.a.engine->deregister(source);
      std::fill(from.begin(), from.end(), std::byte{0xee});
      p.b.on_event = [&](const Event& event) {
        if (event.kind == EventKind::written) EXPECT_TRUE(same_bytes(to, posted));
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

// Writes into memory that its owner takes back end once each, and nothing lands there afterwards.
TEST_P(Conformance, WritesIntoMemoryThatIsTakenBackEndOnceAndTouchNothing) {
  constexpr std::uint64_t kWrites = 16;
  auto p = pair();
  std::vector<std::byte> from(MiB, std::byte{0x5a}), to(kWrites * MiB);
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < kWrites; ++i)
    writes.push_back({.context = i,
                      .local = {source, 0},
                      .remote = {p.b.engine->remote(target), i * MiB},
                      .length = MiB,
                      .notify = i});
  ASSERT_TRUE(p.a.engine->write(p.at_a, writes));
  ASSERT_TRUE(until([&] { return !p.b.written.empty() || p.a.completions.size() == kWrites; }));
  p.b.engine->deregister(target);
  std::fill(to.begin(), to.end(), std::byte{0xee});
  ASSERT_TRUE(until([&] { return p.a.completions.size() == kWrites; }));
  settle();
  for (const auto& [context, times] : p.a.completions) EXPECT_EQ(times, 1) << context;
  EXPECT_TRUE(all_are(std::byte{0xee}, to)) << "something landed";
  p.a.engine->deregister(source);
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
    const RegionId mine = *p.a.engine->register_region(here, kind, kAnyAccess);
    const RegionId theirs = *p.b.engine->register_region(there, kind, kAnyAccess);
    const Read read{.context = 1, .local = {mine, 0}, .remote = {p.b.engine->remote(theirs), 0}, .length = here.size()};
    ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
    settle(p.b);
    p.b.engine->deregister(theirs);
    std::fill(there.begin(), there.end(), std::byte{0xee});
    ASSERT_TRUE(until([&] { return p.a.completions[1] == 1; }));
    if (!p.a.outcome[1])
      EXPECT_TRUE(all_are(std::byte{0x5a}, here)) << "it ended well with bytes that were never registered";
    p.a.engine->deregister(mine);
    nodes.clear();
  }
}

}  // namespace
}  // namespace rejoin::transport
