// What an audit of the state sees, however it is cut.
#include "rejoin/state_audit.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/text.h"
#include "control.pb.h"
#include "ftar/operation.h"
#include "ftar/results.h"

namespace rejoin {
namespace {

local::Owner state() {
  auto manifest = local::Manifest::make({{.name = "a", .count = 300'007, .columns = 3},
                                         {.name = "b", .type = DataType::bfloat16, .count = 5, .columns = 1},
                                         {.name = "c", .count = 40'000, .columns = 2, .elementwise = false}});
  return *local::Owner::make(*manifest);
}

std::vector<std::uint64_t> digests_of(StateAudit& audit, std::uint64_t period) {
  std::vector<std::uint64_t> digests;
  for (std::uint64_t phase = 0; phase < period; ++phase) digests.push_back(*audit.digest(period, phase));
  return digests;
}

TEST(StateAudit, EveryByteIsInExactlyOnePartAndItsTensorIsNamed) {
  local::Owner owner = state();
  auto audit = *StateAudit::make(owner);
  std::mt19937_64 random(3);
  for (const std::uint64_t period : {1, 2, 7, 64, 1000, 100'000}) {
    const bool few = period > 1000;  // looking at all of them takes long
    const auto before = digests_of(*audit, period);
    for (int time = 0; time < (few ? 2 : 20); ++time) {
      const auto tensor = static_cast<std::uint32_t>(random() % 3);
      const auto& what = owner.manifest().tensors()[tensor];
      const auto column = owner.column(tensor, static_cast<std::uint32_t>(random() % what.columns));
      const std::size_t at = time == 0 ? 0 : time == 1 ? column.size() - 1 : random() % column.size();
      column[at] ^= std::byte{1};
      const auto after = digests_of(*audit, period);
      std::vector<std::uint64_t> found;
      for (std::uint64_t phase = 0; phase < period; ++phase)
        if (before[phase] != after[phase]) found.push_back(phase);
      ASSERT_EQ(found.size(), 1u) << "period " << period << ", tensor " << what.name << ", byte " << at;
      const auto wrong = *audit->range_digests(period, found[0]);
      column[at] ^= std::byte{1};
      const auto right = *audit->range_digests(period, found[0]);
      ASSERT_EQ(wrong.size(), right.size());
      std::size_t differing = 0;
      for (std::size_t i = 0; i < wrong.size(); ++i) {
        if (wrong[i].digest == right[i].digest) continue;
        ++differing;
        EXPECT_EQ(wrong[i].tensor, what.name);
        EXPECT_LE(wrong[i].first, at / size_of(what.type));
        EXPECT_GT(wrong[i].first + wrong[i].count, at / size_of(what.type));
      }
      EXPECT_EQ(differing, 1u);
    }
  }
}

TEST(StateAudit, APartThatThereIsNotIsAnError) {
  local::Owner owner = state();
  auto audit = *StateAudit::make(owner);
  EXPECT_FALSE(audit->digest(4, 4));
  EXPECT_FALSE(audit->digest(0, 0));
}

// Many names, and only as many characters of them as fit.
TEST(StateAudit, TheNamesOfARangeAreCutBehindAWholeCharacter) {
  std::vector<local::Tensor> tensors;
  for (int i = 0; i < 20'000; ++i)
    tensors.push_back({.name = fmt::format("{}é{}", i, std::string(i % 7, 'x')), .count = 1, .columns = 1});
  local::Owner owner = *local::Owner::make(*local::Manifest::make(std::move(tensors)));
  const auto range_digests = (*StateAudit::make(owner))->range_digests(1, 0);
  ASSERT_TRUE(range_digests);
  std::size_t longest = 0;
  for (const auto& range : *range_digests) {
    longest = std::max(longest, range.tensor.size());
    EXPECT_TRUE(is_utf8(range.tensor)) << range.tensor;
  }
  EXPECT_GE(longest, StateAudit::kLongestName - 1) << "none was cut";
}

// What a local socket takes where net.core.wmem_max is the kernel's 212,992, and what a daemon reads at most is more.
TEST(StateAudit, TheLongestReportOfAllThatDiffersGoesInOneMessage) {
  constexpr std::uint32_t kMost = ~0u;
  proto::FromNode report;
  auto& details = *report.mutable_details();
  details.set_replica(kMost), details.set_rank(kMost), details.set_epoch(~0ull);
  for (std::size_t b = 0; b < ftar::Tag::kMaxBuckets; ++b) {
    auto& bucket = *details.add_buckets();
    for (std::size_t s = 0; s < ftar::kMostSegments / ftar::Tag::kMaxBuckets; ++s) {
      auto& segment = *bucket.add_segments();
      segment.set_digest(~0ull), segment.set_from(kMost);
    }
  }
  for (std::size_t i = 0; i < StateAudit::kMostRanges; ++i) {
    auto& range = *details.add_state();
    range.set_tensor(std::string(StateAudit::kLongestName, 'n'));
    range.set_first(1ull << 40), range.set_count(1ull << 40), range.set_digest(~0ull);
  }
  EXPECT_LT(report.ByteSizeLong(), 2 * 212'992u - 4 * KiB);
}

TEST(StateAudit, ADigestOfOnePartIsNotThatOfAnother) {
  local::Owner owner = state();  // all zero
  auto audit = *StateAudit::make(owner);
  const auto digests = digests_of(*audit, 64);
  EXPECT_EQ(std::set(digests.begin(), digests.end()).size(), 64u);
}

}  // namespace
}  // namespace rejoin
