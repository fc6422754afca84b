// Whole all-reduces of every element type and operation, in the ring and beside it, with and without a member that
// catches up. The elements are small whole numbers, whose sums and means every type holds exactly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/arithmetic.h"
#include "base/fd.h"
#include "ftar/communicator.h"
#include "transport/sim/fabric.h"

namespace rejoin::ftar {
namespace {

void store(DataType type, std::byte* at, int value) {
  const auto as = [&](auto converted) { std::memcpy(at, &converted, sizeof converted); };
  switch (type) {
    case DataType::float32: return as(static_cast<float>(value));
    case DataType::float64: return as(static_cast<double>(value));
    case DataType::bfloat16: return as(arithmetic::to_bfloat16(static_cast<float>(value)));
    case DataType::float16: return as(arithmetic::to_float16(static_cast<float>(value)));
    case DataType::int32: return as(static_cast<std::int32_t>(value));
    case DataType::int64: return as(static_cast<std::int64_t>(value));
  }
}

struct Case {
  DataType type;
  ReduceOp op;
  std::uint32_t contributors, joiners;
  bool direct;
};

struct Party {
  std::unique_ptr<transport::Engine> engine;
  std::vector<Bytes> inputs, outputs;  // by bucket
  std::unique_ptr<Communicator> communicator;
  std::size_t done = 0;
};

const std::vector<std::size_t> kCounts{1, 2, 33, 3000};

// What each member gives and all must get, by bucket: `given[member]`, then the result.
struct Plan {
  std::vector<std::vector<Bytes>> given;
  std::vector<Bytes> expected;

  Plan(const Case& c, std::mt19937_64& random) : given(c.contributors + c.joiners), expected() {
    const auto n = static_cast<int>(c.contributors);
    for (const std::size_t count : kCounts) {
      for (auto& member : given) member.emplace_back(count * size_of(c.type));
      expected.emplace_back(count * size_of(c.type));
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = i * size_of(c.type);
        const int mean = static_cast<int>(random() % 31) - 15;
        int left = n * mean;  // what the last one has to give
        for (std::uint32_t m = 0; m < given.size(); ++m) {
          int value = static_cast<int>(random() % 21) - 10;
          if (m + 1 == c.contributors) value = left;
          if (m < c.contributors) left -= value;
          store(c.type, given[m].back().data() + at, value);  // of a joiner: nothing must come of it
        }
        store(c.type, expected.back().data() + at, c.op == ReduceOp::sum ? n * mean : mean);
      }
    }
  }
};

void run(const Case& c) {
  std::mt19937_64 random(7);
  const Plan plan(c, random);
  VirtualClock clock;
  transport::sim::Fabric fabric({.seed = 3}, clock);
  const std::size_t direct_bytes = c.direct ? 32 * KiB : 0;
  std::vector<Party> ranks;  // before the ring: their engines end first
  std::vector<RingMember> ring;
  std::vector<transport::Address> addresses;
  for (std::uint32_t m = 0; m < plan.given.size(); ++m) {
    Party& rank = ranks.emplace_back();
    rank.engine = fabric.make_engine();
    addresses.push_back(*rank.engine->listen({"sim"}));
    rank.inputs = plan.given[m];
    std::vector<BucketSpec> buckets;
    for (std::size_t b = 0; b < kCounts.size(); ++b) rank.outputs.emplace_back(rank.inputs[b].size(), std::byte{0xee});
    for (std::size_t b = 0; b < kCounts.size(); ++b)
      buckets.push_back({c.type, kCounts[b], rank.inputs[b], rank.outputs[b]});
    ring.push_back({{ReplicaId(m), Incarnation(m + 1)}, m < c.contributors ? Role::contributor : Role::catching_up});
    auto made =
        Communicator::make(*rank.engine, {.chunk_bytes = 256, .chunks_in_flight = 3, .direct_bytes = direct_bytes},
                           ring.back().member, std::move(buckets), {.job = 42, .rank = 0});
    ASSERT_TRUE(made) << made.error().message;
    rank.communicator = std::move(*made);
    for (std::uint32_t other = 0; other < m; ++other)
      ASSERT_TRUE(rank.communicator->connect(ring[other].member, addresses[other]));
  }
  for (auto& rank : ranks) {
    rank.communicator->enter(Epoch(1), ring);
    for (std::uint32_t b = 0; b < kCounts.size(); ++b) ASSERT_TRUE(rank.communicator->all_reduce(b, Step(1), c.op));
  }
  const auto works = [](const Party& rank) { return rank.communicator->working(); };
  for (int idle = 0; idle < 4; idle = fabric.step() || std::ranges::any_of(ranks, works) ? 0 : idle + 1)
    for (auto& rank : ranks)
      for (const auto& outcome : rank.communicator->poll(clock.now())) rank.done += outcome.kind == Outcome::Kind::done;
  for (std::size_t m = 0; m < ranks.size(); ++m) {
    ASSERT_EQ(ranks[m].done, kCounts.size()) << "member " << m;
    for (std::size_t b = 0; b < kCounts.size(); ++b) {
      EXPECT_EQ(ranks[m].outputs[b], plan.expected[b]) << "member " << m << ", bucket of " << kCounts[b];
      EXPECT_EQ(ranks[m].inputs[b], plan.given[m][b]) << "input-intact";
    }
  }
  for (auto& rank : ranks) rank.communicator.reset();
}

TEST(FtarTypes, EveryTypeAndOperationGivesWhatItsElementsAddUpTo) {
  for (auto type : kDataTypes)
    for (auto op : {ReduceOp::sum, ReduceOp::mean})
      for (const auto& [contributors, joiners] : {std::pair{1u, 0u}, {1u, 2u}, {2u, 0u}, {3u, 1u}, {4u, 0u}, {5u, 1u}})
        for (bool direct : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << to_string(type) << (op == ReduceOp::sum ? " sum of " : " mean of ") << contributors
                       << " with " << joiners << " joining" << (direct ? ", directly" : ", in the ring"));
          run({type, op, contributors, joiners, direct});
        }
}

TEST(FtarTypes, ABucketWithoutElementsIsRefusedAndSaysSo) {
  VirtualClock clock;
  transport::sim::Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  const auto made = Communicator::make(*engine, {}, {}, {{DataType::float32, 0, {}, {}}}, {1, 0});
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("bucket 0 has no elements"), std::string::npos) << made.error().message;
}

// No ring may need a chunk number that a write's notification can't hold. Nothing looks into the memory.
TEST(FtarTypes, ABucketOfMoreChunksThanATagCanNameIsRefusedAndSaysSo) {
  VirtualClock clock;
  transport::sim::Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  auto mapping = Mapping::anonymous(4096);
  ASSERT_TRUE(mapping);
  const auto make = [&](std::size_t bytes) {
    const std::span<std::byte> memory(mapping->data(), bytes);
    return Communicator::make(*engine, {.chunk_bytes = 64}, {}, {{DataType::float32, bytes / 4, memory, memory}},
                              {1, 0});
  };
  EXPECT_TRUE(make(64 * ((1 << 24) - 8192)));
  const auto over = make(64 * std::size_t{1 << 24});
  ASSERT_FALSE(over);
  EXPECT_NE(over.error().message.find("make chunks larger"), std::string::npos) << over.error().message;
}

}  // namespace
}  // namespace rejoin::ftar
