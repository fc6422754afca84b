// What a manifest refuses says which tensor it is.
#include <gtest/gtest.h>

#include "local/manifest.h"

namespace rejoin::local {
namespace {

TEST(Manifest, ATensorWithoutElementsIsRefusedByName) {
  const auto refused = Manifest::make({{.name = "w", .count = 5}, {.name = "nothing", .count = 0}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "tensor 'nothing' has 0 elements; there must be 1 to 17592186044416");
}

TEST(Manifest, ANameThatIsTooLongIsShownAsFarAsItTells) {
  const std::string whole = std::string(79, 'w') + "ß";  // of which half would be left
  const auto refused = Manifest::make({{.name = whole + std::string(120, 'w'), .count = 5}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "tensor '" + whole.substr(0, 79) +
                                         "…' has a name of 201 bytes; there must be 1 to 200: give it a shorter one, "
                                         "or the modules that it is named after");
  EXPECT_TRUE(Manifest::make({{.name = whole + std::string(119, 'w'), .count = 5}}));
}

}  // namespace
}  // namespace rejoin::local
