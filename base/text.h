// Texts of others, as far as they are shown.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rejoin {

bool is_utf8(std::string_view text);

// What it says beside the times in it, "3 s" or "1.5 ms": those go on.
std::string without_times(std::string_view text);

// What is to be written where this is an IPv6 address before a port, without the brackets that tell the two apart.
std::optional<std::string> lacks_brackets(std::string_view host_port);

// At most so many bytes of it, and no part of a character of UTF-8.
inline std::string cut(std::string text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  text.resize(bytes);
  return text;
}

// The same, and that something is missing is shown.
inline std::string shortened(const std::string& text, std::size_t bytes) {
  return text.size() <= bytes ? text : cut(text, bytes) + "…";
}

}  // namespace rejoin
