#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "base/digest.h"
#include "shm/owner.h"
#include "shm/view.h"

namespace rejoin::shm {
namespace {

Manifest sample(std::uint64_t count = 3'000'000, bool elementwise = true) {
  return *Manifest::make({{.name = "w", .count = count, .columns = 3, .elementwise = elementwise},
                          {.name = "b", .count = 7, .columns = 1}});
}

Fd copy_of(const Fd& fd) { return duplicate(fd.get()).value(); }

View view_of(const Owner& owner) {
  auto view = View::of(owner);
  EXPECT_TRUE(view) << view.error().message;
  return std::move(*view);
}

TEST(Manifest, SlicesCoverEveryElementOnceAndSurviveTheWire) {
  const Manifest manifest = sample();
  std::vector<std::uint64_t> covered(2);
  for (const auto& slice : manifest.slices()) covered[slice.whole.tensor] += slice.whole.count;
  EXPECT_EQ(covered[0], 3'000'000u);
  EXPECT_EQ(covered[1], 7u);
  for (const auto& part : manifest.parts()) EXPECT_LE(manifest.bytes_of(part), kPartBytes);
  auto parsed = Manifest::parse(manifest.serialise());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->hash(), manifest.hash());
}

TEST(Manifest, ATensorThatIsNotElementwiseIsOneSliceOfSeveralParts) {
  const Manifest manifest = sample(3'000'000, false);
  EXPECT_EQ(manifest.slices().size(), 2u);
  EXPECT_EQ(manifest.slices()[0].parts, 35u);
  auto huge = Manifest::make({{.name = "w", .count = 100'000'000, .columns = 3, .elementwise = false}});
  ASSERT_FALSE(huge);
  EXPECT_NE(huge.error().message.find("declare it elementwise"), std::string::npos);
}

TEST(Manifest, GarbageIsRefusedAtEveryLength) {
  Bytes bytes = sample().serialise();
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(Manifest::parse(BytesView(bytes).first(length)));
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    Bytes broken = bytes;
    broken[random() % broken.size()] = static_cast<std::byte>(random());
    (void)Manifest::parse(broken);  // an error or another manifest, never a crash
  }
}

TEST(View, RefusesSegmentsOfAnotherSizeOrWithoutSeals) {
  auto owner = *Owner::make(sample());
  auto wrong = View::make(sample(10), copy_of(owner.state_fd()), copy_of(owner.page_fd()), copy_of(owner.aside_fd()),
                          copy_of(owner.doorbell()));
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().message.find("its manifest needs"), std::string::npos);
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  const Fd other_end(pipe_fds[1]);
  EXPECT_FALSE(View::make(sample(), Fd(pipe_fds[0]), copy_of(owner.page_fd()), copy_of(owner.aside_fd()),
                          copy_of(owner.doorbell())));
}

TEST(Pins, AnUpdateCopiesWhatIsHeldAside) {
  auto owner = *Owner::make(sample());
  auto view = view_of(owner);
  owner.set_version(4);
  std::memset(owner.state().data(), 0x11, owner.state().size());
  auto held = view.hold({0, 1});
  ASSERT_TRUE(held);
  EXPECT_EQ(held->first, 4u);
  const auto before = digest_held(view, held->second[0]);
  ASSERT_TRUE(owner.begin_update());
  std::memset(owner.state().data(), 0x22, owner.state().size());
  owner.end_update(5);
  EXPECT_EQ(view.where(held->second[0]), View::Where::aside);
  EXPECT_EQ(digest_held(view, held->second[0]), before);
  EXPECT_EQ(view.copied_aside(), view.manifest().bytes_of(view.manifest().parts()[0]) +
                                     view.manifest().bytes_of(view.manifest().parts()[1]));
  for (const auto& one : held->second) EXPECT_FALSE(view.release(one));
  EXPECT_EQ(view.free_pins(), kMaxPins);
}

TEST(Pins, NothingIsHeldWhileAnUpdateRuns) {
  auto owner = *Owner::make(sample());
  auto view = view_of(owner);
  ASSERT_TRUE(owner.begin_update());
  EXPECT_FALSE(view.hold({0}));
  owner.end_update(1);
  EXPECT_TRUE(view.hold({0}));
}

// The promise under real concurrency: whatever a hold reads is one version, whole, although updates go on.
// In turns: the trainer waits for the reader, the reader for the trainer's next update, and both race.
TEST(Pins, WhatIsHeldIsOneVersionHoweverFastTheTrainerUpdates) {
#ifdef REJOIN_SANITIZED
  constexpr int turns = 30;
#else
  constexpr int turns = 600;
#endif
  auto owner = *Owner::make(*Manifest::make({{.name = "w", .count = 20000, .columns = 3}}));
  auto view = view_of(owner);
  std::atomic<bool> stop{false}, wait_for_reader{false};
  std::thread trainer([&] {
    auto* words = reinterpret_cast<std::atomic<std::uint32_t>*>(owner.state().data());
    for (std::uint32_t version = 1; !stop; ++version) {
      ASSERT_TRUE(owner.begin_update());
      for (std::size_t i = 0; i < owner.state().size() / 4; ++i) words[i].store(version, std::memory_order_relaxed);
      owner.end_update(version);
      for (int pause = 0; pause < 50 || (wait_for_reader && !stop); ++pause) std::this_thread::yield();
    }
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int from_state = 0, from_aside = 0;
  for (int turn = 0; turn < turns && std::chrono::steady_clock::now() < deadline; ++turn) {
    wait_for_reader = turn % 3 == 0;
    auto held = view.hold({0});
    for (; !held && std::chrono::steady_clock::now() < deadline; held = view.hold({0})) std::this_thread::yield();
    if (!held) break;
    const auto version = static_cast<std::uint32_t>(held->first);
    const auto& one = held->second[0];
    std::vector<std::uint32_t> copy(60000);
    const auto* live = reinterpret_cast<std::atomic<std::uint32_t>*>(view.state().data());
    for (std::size_t i = 0; i < 20000; ++i) copy[i] = live[i].load(std::memory_order_relaxed);
    while (turn % 3 == 1 && view.where(one) == View::Where::state && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    if (view.where(one) == View::Where::state) {
      for (std::size_t i = 0; i < 20000; ++i) ASSERT_EQ(copy[i], version);
      ++from_state;
    } else {
      while (view.where(one) == View::Where::copying) std::this_thread::yield();
      std::memcpy(copy.data(), view.aside().data() + view.aside_offset(one), copy.size() * 4);
      for (auto word : copy) ASSERT_EQ(word, version);
      ++from_aside;
    }
    view.release(one);
  }
  stop = true;
  trainer.join();
  EXPECT_GE(from_state, turns / 3 - 1);
  EXPECT_GE(from_aside, turns / 3 - 1);
}

TEST(Digest, AllInstructionSetsAgreeAtEveryLength) {
  std::mt19937 random(3);
  Bytes bytes(5'000'000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t length : {0ul, 1ul, 17ul, 240ul, 4095ul, 4096ul, 4097ul, 100'000ul, 4'194'304ul, 5'000'000ul})
    EXPECT_EQ(digest(BytesView(bytes).first(length)), digest_plain(BytesView(bytes).first(length))) << length;
}

TEST(Digest, EveryByteAndItsPlaceMatter) {
  Bytes bytes(20000);
  const auto plain = digest(bytes);
  for (std::size_t i : {0ul, 4095ul, 4096ul, 19999ul}) {
    bytes[i] = std::byte{1};
    EXPECT_NE(digest(bytes), plain);
    bytes[i] = std::byte{0};
  }
  EXPECT_NE(digest(BytesView(bytes).first(19999)), plain);
}

}  // namespace
}  // namespace rejoin::shm
