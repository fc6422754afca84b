// In which tensor two replicas differ, for people.
#include "membership/declaration.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

proto::Declaration of(const std::vector<std::pair<std::string, std::uint64_t>>& tensors, std::uint32_t bucket = 0) {
  proto::Declaration all;
  for (const auto& [name, count] : tensors) {
    auto& tensor = *all.add_tensors();
    tensor.set_name(name);
    tensor.set_type("float32");
    tensor.set_count(count);
    tensor.set_elementwise(true);
    tensor.set_bucket(bucket);
  }
  return all;
}

TEST(Declaration, TheFirstTensorThatDiffersIsNamedWithBothShapes) {
  EXPECT_EQ(
      first_difference(of({{"a", 1}, {"b", 2}, {"c", 3}}), of({{"a", 1}, {"b", 4}, {"c", 5}})),
      "tensor 'b' has 2 elements of float32, 0 moments, bucket 0 here, and 4 elements of float32, 0 moments, bucket "
      "0 there");
  EXPECT_EQ(
      first_difference(of({{"a", 1}}), of({{"a", 1}}, 3)),
      "tensor 'a' has 1 elements of float32, 0 moments, bucket 0 here, and 1 elements of float32, 0 moments, bucket "
      "3 there");
}

TEST(Declaration, ATensorThatOnlyOneHasIsNamed) {
  EXPECT_EQ(first_difference(of({{"a", 1}, {"b", 2}}), of({{"b", 2}})),
            "tensor 'a' (1 elements of float32, 0 moments, bucket 0) is here alone");
  EXPECT_EQ(first_difference(of({{"b", 2}}), of({{"a", 1}, {"b", 2}})),
            "tensor 'a' (1 elements of float32, 0 moments, bucket 0) is there alone");
  EXPECT_EQ(first_difference(of({{"a", 1}}), of({{"a", 1}, {"b", 2}})),
            "tensor 'b' (2 elements of float32, 0 moments, bucket 0) is there alone");
}

TEST(Declaration, AnotherOrderIsADifference) {
  EXPECT_EQ(first_difference(of({{"a", 1}, {"b", 2}}), of({{"b", 2}, {"a", 1}})),
            "tensor 0 in the order of declaration is 'a' here, and 'b' there");
}

// Each was cut where the message was full: by a longer fingerprint, after fewer tensors.
TEST(Declaration, OfWhatWasCutNothingIsSaidToBeHereAlone) {
  auto one = of({{"a", 1}, {"b", 2}}), other = of({{"a", 1}, {"b", 2}, {"c", 3}});
  one.set_omitted(7);
  other.set_omitted(6);
  const std::string behind =
      "not among the first 2 in the order of declaration, but behind what there was room to tell";
  EXPECT_EQ(first_difference(one, other), behind);
  EXPECT_EQ(first_difference(other, one), behind);
  one.set_fingerprint(std::string(4096, 'f'));
  other.set_fingerprint("a");
  EXPECT_EQ(first_difference(one, other), "");
  EXPECT_EQ(first_difference(other, one), "");
}

TEST(Declaration, ATensorThatMayBeBehindTheCutIsInAnotherOrderOnly) {
  auto cut = of({{"a", 1}, {"b", 2}});
  cut.set_omitted(2);
  EXPECT_EQ(first_difference(cut, of({{"a", 1}, {"c", 3}, {"d", 4}, {"b", 2}})),
            "tensor 1 in the order of declaration is 'b' here, and 'c' there");
  EXPECT_EQ(first_difference(of({{"a", 1}, {"c", 3}, {"d", 4}, {"b", 2}}), cut),
            "tensor 1 in the order of declaration is 'c' here, and 'b' there");
}

TEST(Declaration, OfFingerprintsThatDifferBothAreShown) {
  auto one = of({{"a", 1}}), other = one;
  EXPECT_EQ(fingerprint_difference(one, other), "");
  one.set_fingerprint("torch 2.14");
  other.set_fingerprint("torch 2.15");
  EXPECT_EQ(fingerprint_difference(one, other), "'torch 2.14' here, and 'torch 2.15' there, from byte 9 on");
  other.clear_fingerprint();
  EXPECT_EQ(fingerprint_difference(one, other), "'torch 2.14' here, and '' there, from byte 0 on");
  one.set_fingerprint(std::string(4000, 'x') + "=1\n" + std::string(93, 'x'));
  other.set_fingerprint(std::string(4000, 'x') + "=2\n" + std::string(93, 'x'));
  const std::string tail(93, 'x');
  EXPECT_EQ(fingerprint_difference(one, other), "'…" + std::string(59, 'x') + "=1?" + tail + "' here, and '…" +
                                                    std::string(59, 'x') + "=2?" + tail + "' there, from byte 4001 on");
}

TEST(Declaration, OfWhatIsAlikeNothingIsSaid) { EXPECT_EQ(first_difference(of({{"a", 1}}), of({{"a", 1}})), ""); }

}  // namespace
}  // namespace rejoin::membership
