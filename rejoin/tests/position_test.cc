#include "rejoin/position.h"

#include <gtest/gtest.h>

namespace rejoin {
namespace {

const Position kPosition(800, {{0, 25584}, {25600, 25616}}, 0x0123456789abcdef);

TEST(Position, ComesBackFromItsText) {
  for (const Position& position : {kPosition, kPosition.without_digest(), Position{}}) {
    const auto back = Position::from_text(position.text() + "\n");
    ASSERT_TRUE(back) << back.error().message;
    EXPECT_EQ(*back, position);
  }
  for (const char c : kPosition.text()) EXPECT_TRUE(c >= ' ' && c <= '~') << "printable: " << int{c};
}

TEST(Position, ThatIsCutOffOrChangedAnywhereIsNotTaken) {
  const std::string text = kPosition.text();
  for (std::size_t size = 0; size < text.size(); ++size)
    EXPECT_FALSE(Position::from_text(text.substr(0, size))) << text.substr(0, size);
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = changed[at] == '1' ? '2' : '1';
    EXPECT_FALSE(Position::from_text(changed)) << changed;
  }
  const auto damaged = Position::from_text(text + "x");
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code, ErrorCode::corrupt);
  EXPECT_NE(damaged.error().message.find("is not a whole Rejoin position"), std::string::npos);
}

TEST(Position, OfALaterFormatIsToldApartFromDamage) {
  std::string later = kPosition.text();
  later.replace(later.find(" 1 "), 3, " 2 ");
  const auto position = Position::from_text(later);
  ASSERT_FALSE(position);
  EXPECT_EQ(position.error().code, ErrorCode::mismatch);
  EXPECT_NE(position.error().message.find("format '2'"), std::string::npos) << position.error().message;
}

}  // namespace
}  // namespace rejoin
