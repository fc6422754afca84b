#include "catchup/landed.h"

#include <gtest/gtest.h>

#include <vector>

namespace rejoin::catchup {
namespace {

// A landing that is reported late, or was of an earlier fetch, tells nothing about the bytes that are there now.
TEST(Landed, ADigestFitsTheRoundOfWritesThatItIsOfAndNoOther) {
  Landed landed;
  const Generation first{ReplicaId(1), 7}, second{ReplicaId(1), 8}, other{ReplicaId(2), 8};
  landed.add(first, 3, 0, 100);
  landed.add(first, 3, 1, 101);
  EXPECT_EQ(landed.take(first, 3, 2), combine_digests(combine_digests(0, 100), 101));
  EXPECT_FALSE(landed.take(first, 3, 2)) << "it is given out once";
  landed.add(first, 3, 1, 101);  // reported late
  landed.add(second, 3, 0, 200);
  EXPECT_FALSE(landed.take(second, 3, 2)) << "of one column nobody knows";
  landed.add(second, 3, 0, 200);
  landed.add(second, 3, 1, 201);
  EXPECT_FALSE(landed.take(other, 3, 2));
  landed.add(second, 3, 0, 200);
  landed.add(second, 3, 1, 201);
  landed.forget(ReplicaId(1));
  EXPECT_FALSE(landed.take(second, 3, 2)) << "its next connection counts generations anew";
}

TEST(Arrived, DigestsAreKnownAtTheVersionThatCameAlone) {
  Arrived arrived;
  arrived.put(4, 7, {1, 2});
  ASSERT_NE(arrived.at(4, 7), nullptr);
  EXPECT_EQ(*arrived.at(4, 7), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(arrived.at(4, 8), nullptr) << "an update has changed it";
  EXPECT_EQ(arrived.at(5, 7), nullptr);
  arrived.forget(4);
  EXPECT_EQ(arrived.at(4, 7), nullptr);
}

}  // namespace
}  // namespace rejoin::catchup
