// Several short texts in one string. The coordinator keeps five of each rank, and of 100,000 ranks five strings each
// would take some 13 MB more.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace rejoin::membership {

// `Field` is an enumeration of the texts, numbered from 0 in the order in which the constructor takes them.
template <typename Field, std::size_t kFields>
class PackedText {
 public:
  PackedText() = default;
  explicit PackedText(const std::array<std::string_view, kFields>& texts) {
    for (std::size_t i = 0; i < kFields; ++i) {
      text_ += texts[i];
      if (i < ends_.size()) ends_[i] = static_cast<std::uint32_t>(text_.size());
    }
    text_.shrink_to_fit();
  }

  // Valid until this object changes.
  std::string_view at(Field field) const {
    const auto number = static_cast<std::size_t>(field);
    const std::size_t begin = number == 0 ? 0 : ends_[number - 1];
    const std::size_t end = number == ends_.size() ? text_.size() : ends_[number];
    return std::string_view(text_).substr(begin, end - begin);
  }

 private:
  std::array<std::uint32_t, kFields - 1> ends_{};  // of each text but the last, which ends with the string
  std::string text_;
};

}  // namespace rejoin::membership
