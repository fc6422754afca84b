#include "ftar/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/bytes.h"
#include "base/sanitized.h"
#include "ftar/operation.h"

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
  for (std::size_t element : {1ul, 2ul, 4ul, 8ul})
    for (std::size_t elements : {1ul, 2ul, 16ul, 17ul, 250ul, 25000ul})
      for (std::uint32_t contributors : {1u, 2u, 3u, 4u, 7u})
        for (std::uint32_t joiners : {0u, 1u, 2u})
          for (bool both : {false, true})
            play({.bytes = elements * element,
                  .element = element,
                  .contributors = contributors,
                  .members = contributors + joiners,
                  .chunk_bytes = 4096,
                  .both_ways = both});
}

// The same of rings that are too large to play: each send is of what its sender has, and to one who waits for it.
void check_sends(const Shape& shape) {
  const Schedule schedule(shape);
  const std::uint32_t n = shape.contributors;
  for (std::uint32_t p = 0; p < n; ++p) {
    std::uint32_t round = 0;
    std::set<std::uint32_t> sent;
    for (auto chunk : schedule.reduce_scatter_sends(p)) {
      const auto s = schedule.segment_of(chunk);
      if (sent.insert(s).second) round = static_cast<std::uint32_t>(sent.size()) - 1;
      ASSERT_TRUE(schedule.valid(chunk));
      // What is empty leaves no gap in the rounds.
      ASSERT_GE(schedule.receive_round((p + 1) % n, s), round) << "member " << p << " chunk " << chunk;
      if (schedule.receive_round((p + 1) % n, s) > 0)
        ASSERT_EQ(schedule.receive_round(p, s), schedule.receive_round((p + 1) % n, s) - 1) << "it has not got it";
    }
    if (n > 1) ASSERT_EQ(schedule.receive_round(p, p), n - 2) << "the last round completes its own segment";
  }
  std::uint64_t sends = 0;
  for (std::uint32_t p = 0; p < shape.members; ++p)
    for (auto direction : {Direction::right, Direction::left}) {
      const auto to = direction == Direction::right ? (p + 1) % shape.members : (p + shape.members - 1) % shape.members;
      for (auto chunk : schedule.all_gather_sends(p, direction)) {
        const auto s = schedule.segment_of(chunk);
        ASSERT_TRUE(p == s || schedule.all_gather_receives(p, s, direction)) << "member " << p << " has not got it";
        ASSERT_TRUE(schedule.all_gather_receives(to, s, direction));
        ++sends;
      }
    }
  EXPECT_EQ(sends, std::uint64_t{schedule.all_chunks()} * (shape.members - 1)) << "each chunk to everyone once";
}

// Chunks lie one behind the other, from the first byte to the last.
void check_ranges(const Shape& shape) {
  const Schedule schedule(shape);
  std::uint64_t covered = 0, chunks = 0;
  for (std::uint32_t s = 0; s < schedule.segments(); ++s)
    for (std::uint32_t i = 0; i < schedule.chunks_of(s); ++i, ++chunks) {
      const auto id = schedule.chunk_id(s, i);
      const Range range = schedule.chunk(id);
      const bool sound = range.offset == covered && range.length > 0 && range.length % shape.element == 0 &&
                         range.length <= shape.chunk_bytes && schedule.segment_of(id) == s && schedule.valid(id);
      ASSERT_TRUE(sound) << "chunk " << id << ": " << range.offset << "+" << range.length << " after " << covered;
      covered += range.length;
    }
  EXPECT_EQ(covered, shape.bytes);
  EXPECT_EQ(chunks, schedule.all_chunks());
  EXPECT_FALSE(schedule.valid(schedule.segments() * schedule.stride()));
}

TEST(Schedule, RingsOfAThousandMembersSendWhatTheyHaveToThoseWhoWaitForIt) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> rings{{511, 513}};
  if (!kSanitized) rings.insert(rings.end(), {{1024, 1024}, {1000, 1024}, {1, 1024}});
  for (const auto& [contributors, members] : rings)
    for (std::size_t bytes : {8ul, 64ul * 1024, 64ul * 1024 + 8, 5 * GiB})
      for (bool both : {false, true}) {
        SCOPED_TRACE(testing::Message() << contributors << " of " << members << ", " << bytes << " bytes");
        const Shape shape{.bytes = bytes,
                          .element = 8,
                          .contributors = contributors,
                          .members = members,
                          .chunk_bytes = tuned_chunk(bytes, contributors, 1 * GiB),
                          .both_ways = both};
        check_ranges(shape);
        check_sends(shape);
      }
}

TEST(Schedule, BuffersBeyondFourGibibytesAreCutWithoutAGap) {
  for (std::size_t bytes : {4 * GiB - 8, 4 * GiB, 4 * GiB + 8, 40 * GiB + 24})
    for (std::uint32_t n : {1u, 2u, 3u, 1024u})
      check_ranges({.bytes = bytes, .element = 8, .contributors = n, .members = n, .chunk_bytes = 1 * MiB});
}

TEST(Schedule, AsManyChunksAsATagCanNameAreCutWithoutAGap) {
  for (std::uint32_t n : {1u, 3u, 1024u}) {
    const std::uint64_t limit = 64, bytes = (Tag::kMaxChunks - most_chunks(0, limit)) * limit;
    ASSERT_EQ(most_chunks(bytes, limit), Tag::kMaxChunks);
    const Shape shape{.bytes = bytes, .element = 1, .contributors = n, .members = n, .chunk_bytes = limit};
    check_ranges(shape);
    const Schedule schedule(shape);
    EXPECT_GT(schedule.all_chunks(), 16'000'000u);
    EXPECT_LE(std::uint64_t{schedule.segments()} * schedule.stride(), Tag::kMaxChunks);
    const auto last = schedule.chunk_id(n - 1, schedule.chunks_of(n - 1) - 1);
    const Tag tag{.epoch = 4095, .step = 63, .bucket = 16383, .kind = 1, .slot = 63, .chunk = last};
    EXPECT_EQ(Tag::unpack(tag.packed()).chunk, last);
    EXPECT_EQ(Tag::unpack(tag.packed()).slot, 63u) << "the chunk's number runs over into the slot's";
  }
}

TEST(Schedule, NoChunkHasANumberOverWhatIsReckonedWith) {
  for (std::uint64_t limit : {64ul, 4096ul, 64 * KiB, 1 * MiB, 1 * GiB})
    for (std::uint64_t bytes = 1; bytes < 64 * GiB; bytes = bytes * 3 + 1)
      for (std::uint32_t n = 1; n <= kMaxMembers; n = n * 2 + n / 2 + 1) {
        if (bytes / limit > (1ul << 28)) continue;
        for (const auto chunk : {tuned_chunk(bytes, n, limit), tuned_host_chunk(bytes, n, limit)}) {
          const Schedule schedule(
              {.bytes = bytes, .element = 1, .contributors = n, .members = n, .chunk_bytes = chunk});
          ASSERT_LE(std::uint64_t{n} * schedule.stride(), most_chunks(bytes, std::min(limit, kMostOfHost)))
              << bytes << " by " << n;
        }
      }
}

TEST(Schedule, BothWaysHalvesTheStepsOfTheAllGather) {
  const Schedule schedule({.bytes = 1 << 20, .contributors = 8, .members = 8, .chunk_bytes = 4096, .both_ways = true});
  EXPECT_EQ(schedule.hops(Direction::right), 4u);
  EXPECT_EQ(schedule.hops(Direction::left), 3u);
}

TEST(Schedule, TunedChunksNeverExceedTheLimit) {
  for (std::size_t bytes = 1; bytes < (1ul << 40); bytes = bytes * 2 + bytes % 7)
    for (std::uint32_t n : {1u, 2u, 16u, 1024u})
      for (std::size_t limit : {64ul, 4096ul, 1ul << 20})
        for (const auto chunk : {tuned_chunk(bytes, n, limit), tuned_host_chunk(bytes, n, limit)}) {
          EXPECT_LE(chunk, limit);
          EXPECT_EQ(chunk % 64, 0u) << "it ends at a cache line";
          EXPECT_GE(chunk, std::min(limit, 64 * KiB)) << "none is too small to be worth its cost";
        }
}

TEST(Schedule, TunedChunksAreAQuarterOfASegmentWhereTheLimitAllows) {
  EXPECT_EQ(tuned_chunk(64 * MiB, 16, 4 * MiB), 1 * MiB);
  EXPECT_EQ(tuned_chunk(64 * MiB, 4, 4 * MiB), 4 * MiB);
  EXPECT_EQ(tuned_chunk(64 * MiB, 2, 4 * MiB), 4 * MiB) << "the limit";
  EXPECT_EQ(tuned_chunk(1 * MiB, 16, 4 * MiB), 64 * KiB) << "the least";
}

TEST(Schedule, ChunksOfTheHostsMemoryAreEven) {
  EXPECT_EQ(tuned_host_chunk(8 * MiB, 8, 4 * MiB), 256 * KiB) << "a quarter";
  EXPECT_EQ(tuned_host_chunk(1 * MiB, 3, 4 * MiB), 171 * KiB) << "half of 341.3 KiB, as a third would be too small";
  EXPECT_EQ(tuned_host_chunk(512 * KiB, 3, 4 * MiB), 171 * KiB) << "all of it, as a half would be too small";
  EXPECT_EQ(tuned_host_chunk(1 * MiB, 16, 4 * MiB), 64 * KiB) << "all of it";
  EXPECT_EQ(tuned_host_chunk(64 * MiB, 2, 4 * MiB), 512 * KiB) << "the most of the host's";
  EXPECT_EQ(tuned_host_chunk(64 * MiB, 2, 192 * KiB), 192 * KiB) << "the limit";
}

// Plays it with the sets of whose input a sum has.
TEST(Doubling, EveryMemberGetsEveryInputOnceInLogarithmicallyManyRounds) {
  for (std::uint32_t contributors = 1; contributors <= 40; ++contributors)
    for (std::uint32_t members = contributors; members <= contributors + 41; members += members % 3 == 0 ? 9 : 1) {
      SCOPED_TRACE(testing::Message() << contributors << " of " << members);
      std::vector<Doubling> all;
      std::vector<std::multiset<std::uint32_t>> has(members);
      for (std::uint32_t p = 0; p < members; ++p) {
        all.emplace_back(contributors, members, p);
        if (p < contributors) has[p].insert(p);
      }
      const std::uint32_t rounds = all[0].rounds();
      ASSERT_LE(1u << rounds, contributors);
      ASSERT_GT(2u << rounds, contributors);
      for (std::uint32_t place = 0; place <= rounds; ++place) {
        const auto before = has;
        for (std::uint32_t p = 0; p < members; ++p) {
          const auto from = all[p].sender(place);
          if (!from || (!all[p].in_core())) continue;
          if (place == 0) ASSERT_EQ(all[*from].proxy(), p);
          else ASSERT_EQ(all[*from].sender(place), p) << "both ways";
          has[p].insert(before[*from].begin(), before[*from].end());
        }
      }
      std::vector<int> results(members, 0);
      for (std::uint32_t p = 0; p < members; ++p)  // whoever has it from another one has a higher position
        for (auto to : all[p].beyond()) {
          ASSERT_EQ(all[to].sender(all[to].result()), p);
          ASSERT_TRUE(std::has_single_bit(to ^ p));
          has[to] = has[p];
          ++results[to];
        }
      for (std::uint32_t p = 0; p < members; ++p) {
        EXPECT_EQ(results[p], all[p].in_core() ? 0 : 1);
        ASSERT_EQ(has[p].size(), contributors) << "member " << p;
        for (std::uint32_t one = 0; one < contributors; ++one) ASSERT_EQ(has[p].count(one), 1u);
      }
    }
}

}  // namespace
}  // namespace rejoin::ftar
