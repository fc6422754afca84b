#include "ftar/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/bytes.h"

namespace rejoin::ftar {
namespace {

using Direction = Schedule::Direction;

// Plays a schedule by hand: sets of contributors take the place of sums.
void play(const Shape& shape) {
  SCOPED_TRACE(testing::Message() << shape.bytes << " bytes, " << shape.contributors << " of " << shape.members
                                  << " contribute, both ways " << shape.both_ways);
  const Schedule schedule(shape);
  std::size_t covered = 0;
  for (std::uint32_t s = 0; s < schedule.segments(); ++s) {
    for (std::uint32_t i = 0; i < schedule.chunks_of(s); ++i) {
      const Range range = schedule.chunk(schedule.chunk_id(s, i));
      EXPECT_LE(range.length, round_up(shape.chunk_bytes, 64));
      EXPECT_EQ(range.offset, covered);
      EXPECT_EQ(range.length % shape.element, 0u);
      covered += range.length;
    }
  }
  EXPECT_EQ(covered, shape.bytes);

  const std::uint32_t n = shape.contributors;
  std::vector<std::map<std::uint32_t, std::set<std::uint32_t>>> has(shape.members);
  for (std::uint32_t round = 0; round + 1 < n; ++round)
    for (std::uint32_t p = 0; p < n; ++p)
      for (auto chunk : schedule.reduce_scatter_sends(p)) {
        const auto to = (p + 1) % n;
        if (schedule.receive_round(to, schedule.segment_of(chunk)) != round) continue;
        auto sum = round == 0 ? std::set{p} : has[p][chunk];
        EXPECT_EQ(sum.size(), round + 1u) << "sent before it was complete";
        sum.insert(to);
        has[to][chunk] = sum;
      }
  std::vector<std::set<std::uint32_t>> final(shape.members);
  for (std::uint32_t p = 0; p < n; ++p)
    for (std::uint32_t i = 0; i < schedule.chunks_of(p); ++i) {
      const auto chunk = schedule.chunk_id(p, i);
      if (n > 1) {
        EXPECT_EQ(has[p][chunk].size(), n);
      }
      final[p].insert(chunk);
    }
  for (std::uint32_t hop = 0; hop < shape.members; ++hop)
    for (std::uint32_t p = 0; p < shape.members; ++p)
      for (auto direction : {Direction::right, Direction::left}) {
        const auto to =
            direction == Direction::right ? (p + 1) % shape.members : (p + shape.members - 1) % shape.members;
        for (auto chunk : schedule.all_gather_sends(p, direction))
          if (final[p].contains(chunk)) {
            EXPECT_TRUE(schedule.all_gather_receives(to, schedule.segment_of(chunk), direction));
            final[to].insert(chunk);
          }
      }
  for (auto& chunks : final) EXPECT_EQ(chunks.size(), schedule.all_chunks());
  // No chunk reaches anyone twice.
  std::size_t sends = 0;
  for (std::uint32_t p = 0; p < shape.members; ++p)
    sends +=
        schedule.all_gather_sends(p, Direction::right).size() + schedule.all_gather_sends(p, Direction::left).size();
  EXPECT_EQ(sends, std::size_t{schedule.all_chunks()} * (shape.members - 1));
}

TEST(Schedule, EveryMemberGetsEveryChunkSummedOverAllContributorsOnce) {
  for (std::size_t bytes : {4ul, 64ul, 68ul, 1000ul, 100000ul, 1048576ul})
    for (std::uint32_t contributors : {1u, 2u, 3u, 4u, 7u})
      for (std::uint32_t joiners : {0u, 1u, 2u})
        for (bool both : {false, true})
          play({.bytes = bytes,
                .element = 4,
                .contributors = contributors,
                .members = contributors + joiners,
                .chunk_bytes = 4096,
                .both_ways = both});
}

TEST(Schedule, BothWaysHalvesTheStepsOfTheAllGather) {
  const Schedule schedule({.bytes = 1 << 20, .contributors = 8, .members = 8, .chunk_bytes = 4096, .both_ways = true});
  EXPECT_EQ(schedule.hops(Direction::right), 4u);
  EXPECT_EQ(schedule.hops(Direction::left), 3u);
}

TEST(Schedule, TunedChunksNeverExceedTheLimit) {
  for (std::size_t bytes = 64; bytes < (1ul << 33); bytes *= 2)
    for (std::uint32_t n : {1u, 2u, 16u}) EXPECT_LE(tuned_chunk(bytes, n, 1 << 20), 1ul << 20);
}

}  // namespace
}  // namespace rejoin::ftar
