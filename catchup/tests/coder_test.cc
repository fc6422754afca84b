#include "catchup/coder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>

namespace rejoin::catchup {
namespace {

TEST(Coding, IsUsedOnlyWhereItShortensTheTransfer) {
  const auto decide = [](double link, double ratio, double coder, double limit = 0) {
    CodingDecision decision(Compression::when_it_pays, limit);
    TimePoint now{};
    decision.on_posted(64 * MiB, now);
    now += std::chrono::duration_cast<Duration>(std::chrono::duration<double>(64.0 * MiB / link));
    decision.on_completed(64 * MiB, now);
    if (!decision.wants_sample()) return false;
    decision.on_coded(1 * MiB, static_cast<std::uint64_t>(ratio * MiB),
                      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(1.0 * MiB / coder)));
    return decision.on();
  };
  EXPECT_TRUE(decide(100e6, 0.6, 500e6));
  EXPECT_FALSE(decide(100e6, 0.95, 500e6)) << "it hardly shrinks";
  EXPECT_FALSE(decide(1e9, 0.6, 500e6)) << "the link is faster than the coder";
  EXPECT_FALSE(decide(20e9, 0.01, 500e6)) << "not even tried";
  EXPECT_TRUE(decide(20e9, 0.6, 500e6, 100e6)) << "the stream may use but a little of the link";
}

TEST(Coding, DamagedOrFalseBytesAreAnErrorAndStayInside) {
  Coder coder;
  Bytes plain(100000), coded(100000), out(100000 + 16, std::byte{7});
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i / 50);
  const auto length = coder.encode(plain, coded);
  ASSERT_TRUE(length);
  coded.resize(*length);
  const std::span<std::byte> place(out.data(), 100000);
  ASSERT_TRUE(coder.decode(coded, place));
  EXPECT_TRUE(std::equal(plain.begin(), plain.end(), out.begin()));
  EXPECT_FALSE(coder.decode(coded, place.first(99999)));
  EXPECT_FALSE(coder.decode(BytesView(coded).first(*length / 2), place));
  EXPECT_FALSE(coder.decode(BytesView(plain).first(1000), place));
  EXPECT_EQ(out[100000], std::byte{7});
  std::mt19937 random(1);
  Bytes noise(100000);
  for (auto& byte : noise) byte = static_cast<std::byte>(random());
  EXPECT_FALSE(coder.encode(noise, coded)) << "noise does not shrink";
}

}  // namespace
}  // namespace rejoin::catchup
