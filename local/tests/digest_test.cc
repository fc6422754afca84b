#include "base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "base/fd.h"

namespace rejoin {
namespace {

TEST(Digest, AllInstructionSetsAgreeAtEveryLength) {
  std::mt19937 random(3);
  Bytes bytes(5'000'000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t length : {0ul, 1ul, 17ul, 240ul, 4095ul, 4096ul, 4097ul, 100'000ul, 4'194'304ul, 5'000'000ul})
    EXPECT_EQ(digest(BytesView(bytes).first(length)), digest_plain(BytesView(bytes).first(length))) << length;
}

TEST(Digest, OnTheWayIsThatOfTheBytesAndTheyLandWhole) {
  std::mt19937 random(4);
  Bytes from(1'100'000), to(from.size() + 200);
  for (auto& byte : from) byte = static_cast<std::byte>(random());
  for (const auto copy : {digest_and_copy, digest_and_copy_plain})
    for (std::size_t length : {0ul, 1ul, 63ul, 64ul, 4095ul, 4096ul, 4097ul, 100'000ul, 1'100'000ul})
      for (std::size_t at : {0ul, 1ul, 64ul, 100ul}) {
        std::ranges::fill(to, std::byte{0xee});
        const auto bytes = BytesView(from).first(length);
        EXPECT_EQ(copy(to.data() + at, bytes), digest(bytes)) << length;
        EXPECT_TRUE(std::ranges::equal(BytesView(to).subspan(at, length), bytes)) << length << " at " << at;
        EXPECT_EQ(to[at + length], std::byte{0xee});
        if (at > 0) EXPECT_EQ(to[at - 1], std::byte{0xee});
      }
}

// As when a trainer begins its update while a daemon copies. The writer has the memory mapped elsewhere.
TEST(Digest, OnTheWayIsThatOfWhatLandedAlsoWhileTheBytesChange) {
  constexpr std::size_t kSize = 512 * KiB;
  const Fd file = *make_sealed_memfd("digest_test", kSize);
  const auto from = *Mapping::of(file, kSize), theirs = *Mapping::of(file, kSize);
  Bytes to(kSize);
  std::atomic<bool> over = false;
  std::atomic<std::uint64_t> rounds = 0;
  std::thread writer([&] {
    for (; !over.load(); rounds.fetch_add(1))
      for (std::size_t at = 0; at < kSize; at += 64) theirs.data()[at] = static_cast<std::byte>(rounds.load());
  });
  for (const auto copy : {digest_and_copy, digest_and_copy_plain})
    for (const auto since = rounds.load(); rounds.load() < since + 100;) {
      const auto digested = copy(to.data(), from.span());
      EXPECT_EQ(digested, digest(to));
    }
  over.store(true);
  writer.join();
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
}  // namespace rejoin
