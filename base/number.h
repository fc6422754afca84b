// Numbers as people write them.
#pragma once

#include <charconv>
#include <string_view>

namespace rejoin {

// Reads all of `text` as one number; `base`, of whole numbers, is 10 unless given. False: it is none, or does not fit,
// and `number` is what it was.
template <typename Number, typename... Base>
bool parse_number(std::string_view text, Number& number, Base... base) {
  Number read{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), read, base...);
  if (error != std::errc{} || end != text.data() + text.size()) return false;
  number = read;
  return true;
}

}  // namespace rejoin
