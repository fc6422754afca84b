// Texts of others, as far as they are shown.
#pragma once

#include <string>

namespace rejoin {

// At most so many bytes of it, and no part of a character of UTF-8.
inline std::string shortened(std::string text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  text.resize(bytes);
  return text + "…";
}

}  // namespace rejoin
