// What every backend must do: bytes that are written and read land where they should, whole, and nowhere else.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/fd.h"
#include "base/sanitized.h"
#include "transport/tests/conformance.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

TEST_P(Conformance, WritesOfEverySizeLandWholeBeforeTheirNotification) {
  auto p = pair();
  std::vector<std::uint64_t> sizes{0, 1, 7, 4096, 16 * KiB - 1, 16 * KiB, 16 * KiB + 1, 1 * MiB + 3};
  if (!kSanitized) sizes.push_back(64 * MiB);
  // A test VM has not the memory for two of these, software that plays a GPU takes its time over them, and of each
  // backend one kind does.
  const bool moves_the_most =
      std::set<std::string>{"tcp", "shm", "ibverbs"}.contains(GetParam()) || GetParam().find(',') != std::string::npos;
  if (!kSanitized && kind == MemoryKind::host && moves_the_most &&
      ::sysconf(_SC_PHYS_PAGES) > 4 * static_cast<long>(GiB / 4096))
    sizes.push_back(1 * GiB);
  for (auto size : sizes) {
    std::vector<std::byte> from(std::max<std::size_t>(size, 1)), to(from.size() + 64, std::byte{0xee});
    for (std::size_t i = 0; i < size; i += 61) from[i] = static_cast<std::byte>(i * 31 + size);
    const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
    const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
  for (int round = 0; round < 5; ++round) {
    auto memory = Mapping::shareable(1 * MiB);
    ASSERT_TRUE(memory) << memory.error().message;
    for (std::size_t i = 0; i < memory->size(); ++i)
      memory->data()[i] = static_cast<std::byte>(i * 7 + i / 4096 + round);
    const std::size_t from = 4096 * round + 24 * round, offset = 100 * round, length = 500 * KiB + round;
    const RegionId source = *p.a.engine->register_region(memory->span().subspan(from), kind, kAnyAccess);
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
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
  p.b.on_event = [&](const Event& event) { whole |= event.kind == EventKind::message && same_bytes(from, to); };
  ASSERT_TRUE(p.a.engine->write(p.at_a, {&write, 1}));
  ASSERT_TRUE(until([&] { return !p.b.messages.empty(); }));
  EXPECT_TRUE(whole);
}

TEST_P(Conformance, ReadBringsThePeersBytes) {
  auto p = pair();
  for (std::uint64_t size : {std::uint64_t{1}, 5000 * 1ul, 3 * MiB}) {
    std::vector<std::byte> here(size), there(size);
    for (std::size_t i = 0; i < size; ++i) there[i] = static_cast<std::byte>(i * 7);
    const RegionId mine = *p.a.engine->register_region(here, kind, kAnyAccess);
    const RegionId theirs = *p.b.engine->register_region(there, kind, kAnyAccess);
    const Read read{.context = size, .local = {mine, 0}, .remote = {p.b.engine->remote(theirs), 0}, .length = size};
    ASSERT_TRUE(p.a.engine->read(p.at_a, {&read, 1}));
    ASSERT_TRUE(until([&] { return p.a.completions[size] == 1; }));
    EXPECT_FALSE(p.a.outcome[size]);
    EXPECT_TRUE(same_bytes(here, there));
    p.a.engine->deregister(mine);
    p.b.engine->deregister(theirs);
  }
}

TEST_P(Conformance, BadKeysAndRangesAreRefusedAndTouchNothing) {
  auto p = pair();
  std::vector<std::byte> from(1 * MiB, std::byte{1}), to(64 * KiB);
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
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
  attempt(7, {p.b.engine->remote(target), 0}, 100);
  EXPECT_TRUE(p.b.written.empty());
  EXPECT_TRUE(all_are(std::byte{0}, to));
  // The endpoint is as good as before.
  ASSERT_TRUE(p.a.engine->send(p.at_a, as_bytes("still here")));
  EXPECT_TRUE(until([&] { return !p.b.messages.empty(); }));
}

TEST_P(Conformance, LocalRangesOutsideTheirRegionPostNothing) {
  auto p = pair();
  std::vector<std::byte> from(100), to(1000);
  const RegionId source = *p.a.engine->register_region(from, kind, kAnyAccess);
  const RegionId target = *p.b.engine->register_region(to, kind, kAnyAccess);
  const RemoteRange remote{p.b.engine->remote(target), 0};
  const Write writes[] = {{.context = 1, .local = {source, 0}, .remote = remote, .length = 50, .notify = 1},
                          {.context = 2, .local = {source, 60}, .remote = remote, .length = 50, .notify = 2}};
  EXPECT_FALSE(p.a.engine->write(p.at_a, writes));
  const auto good = std::span(writes).first(1);
  p.a.engine->deregister(source);
  const auto posted = p.a.engine->write(p.at_a, good);
  ASSERT_FALSE(posted);
  EXPECT_NE(posted.error().message.find("is not registered"), std::string::npos) << posted.error().message;
  settle();
  EXPECT_TRUE(p.a.completions.empty());
  EXPECT_TRUE(p.b.written.empty());
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
  const RegionId mine = *p.a.engine->register_region(here.span(), kind, kAnyAccess);
  const RegionId theirs = *p.b.engine->register_region(there.span(), kind, kAnyAccess);
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
  const auto untouched = [](const std::byte* at) { return all_are(std::byte{0}, {at, 1 * MiB}); };
  EXPECT_TRUE(untouched(here.at) && untouched(there.at)) << "an offset was cut to 32 bits";
  p.a.engine->deregister(mine);
  p.b.engine->deregister(theirs);
}

}  // namespace
}  // namespace rejoin::transport
