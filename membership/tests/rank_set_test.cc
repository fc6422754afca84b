// Ranges that come in messages: in any order, and as many as a message has room for.
#include "membership/rank_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "control.pb.h"

namespace rejoin::membership {
namespace {

constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

void put(RankSet::Ranges& ranges, std::uint64_t begin, std::uint64_t end) {
  auto& range = *ranges.Add();
  range.set_begin(begin);
  range.set_end(end);
}

TEST(RankSet, RangesOfAMessageInAnyOrderAreTheSetOfTheirNumbers) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    RankSet::Ranges ranges, others;
    RankSet one_by_one, both;
    for (auto* into : {&ranges, &others})
      for (auto count = random() % 9; count > 0; --count) {
        const std::uint64_t begin = random() % 60, end = begin + random() % 8 - std::min<std::uint64_t>(begin, 2);
        put(*into, begin, end);
        if (into == &ranges) one_by_one.add(begin, std::min<std::uint64_t>(end, 50));
        both.add(begin, std::min<std::uint64_t>(end, 50));
      }
    RankSet set(ranges, 50);
    EXPECT_EQ(set, one_by_one) << set.text() << " and " << one_by_one.text();
    set.add(RankSet(others, 50));
    EXPECT_EQ(set, both) << set.text() << " and " << both.text();
  }
}

// The worst that a message can bring: with a move of all that is there for each range, this takes an hour.
TEST(RankSet, AMillionRangesInDescendingOrderAreReadAtOnce) {
  constexpr std::uint64_t count = 1'000'000;
  RankSet::Ranges even, odd;
  for (std::uint64_t i = count; i > 0; --i) {
    put(even, 4 * i, 4 * i + 1);
    put(odd, 4 * i + 2, 4 * i + 3);
  }
  RankSet all(even, kNoLimit);
  EXPECT_EQ(all.ranges().size(), count);
  EXPECT_EQ(all.ranges().front(), std::pair(std::uint64_t{4}, std::uint64_t{5}));
  all.add(RankSet(odd, kNoLimit));
  EXPECT_EQ(all.size(), 2 * count);
  EXPECT_TRUE(all.contains(4 * count + 2));
  EXPECT_FALSE(all.contains(5));
}

}  // namespace
}  // namespace rejoin::membership
