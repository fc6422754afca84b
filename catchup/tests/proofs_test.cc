#include "catchup/proofs.h"

#include <gtest/gtest.h>

namespace rejoin::catchup {
namespace {

TEST(Proofs, NothingIsProvenBeforeItWasComparedAndNothingThatIsInDoubt) {
  Proofs proofs;
  EXPECT_FALSE(proofs.of(0)) << "nobody has said whose state it is";
  proofs.begin(3);
  EXPECT_FALSE(proofs.of(1));
  proofs.add(1);
  const auto first = proofs.of(1);
  EXPECT_TRUE(first);
  proofs.withdraw(1);
  EXPECT_FALSE(proofs.of(1));
  proofs.add(1);
  EXPECT_NE(proofs.of(1), first) << "they may be other bytes";
  EXPECT_EQ(proofs.log(), std::vector<std::uint32_t>{1});
  EXPECT_FALSE(proofs.of(3)) << "there is no such slice";
  proofs.all();
  EXPECT_TRUE(proofs.of(2));
  proofs.none();
  EXPECT_FALSE(proofs.of(2));
}

}  // namespace
}  // namespace rejoin::catchup
