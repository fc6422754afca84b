#include "membership/packed_text.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

enum class Field : std::uint8_t { first, second, third };
using Three = PackedText<Field, 3>;

TEST(PackedText, EachTextIsFoundByItsField) {
  const Three texts({"abc", "de", "f"});
  EXPECT_EQ(texts.at(Field::first), "abc");
  EXPECT_EQ(texts.at(Field::second), "de");
  EXPECT_EQ(texts.at(Field::third), "f");
}

TEST(PackedText, TextsMayBeEmpty) {
  const Three nothing, some({"", "de", ""});
  for (auto field : {Field::first, Field::second, Field::third}) EXPECT_EQ(nothing.at(field), "");
  EXPECT_EQ(some.at(Field::first), "");
  EXPECT_EQ(some.at(Field::second), "de");
  EXPECT_EQ(some.at(Field::third), "");
}

TEST(PackedText, ACopyHasItsOwnTexts) {
  Three one({"abc", "de", "f"});
  const Three other = one;
  one = Three({"x", "y", "z"});
  EXPECT_EQ(other.at(Field::first), "abc");
  EXPECT_EQ(one.at(Field::third), "z");
}

}  // namespace
}  // namespace rejoin::membership
