#include "base/bytes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/text.h"

namespace rejoin {

namespace {

// Bytes of the character of UTF-8 that `text` begins with; 0: it begins with none.
std::size_t character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return 1;
  const std::size_t length = byte(0) >= 0xc2 && byte(0) < 0xe0   ? 2
                             : byte(0) >= 0xe0 && byte(0) < 0xf0 ? 3
                             : byte(0) >= 0xf0 && byte(0) < 0xf5 ? 4
                                                                 : 0;
  if (length == 0 || length > text.size()) return 0;
  std::uint32_t code = byte(0) & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return code < least[length] || code > 0x10ffff || surrogate ? 0 : length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = character(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string without_times(std::string_view text) {
  constexpr std::string_view of_number = "0123456789.";
  std::string result;
  while (!text.empty()) {
    const std::size_t number = std::min(text.find_first_not_of(of_number), text.size());
    std::string_view unit = text.substr(number);
    if (number > 0 && unit.starts_with(' ')) {
      unit.remove_prefix(unit.starts_with(" ms") ? 2 : 1);
      if (unit.starts_with('s') && (unit.size() == 1 || std::isalnum(static_cast<unsigned char>(unit[1])) == 0)) {
        text = unit.substr(1);
        continue;
      }
    }
    const std::size_t end = std::max<std::size_t>(number, 1);
    result += text.substr(0, end);
    text.remove_prefix(end);
  }
  return result;
}

std::optional<std::string> lacks_brackets(std::string_view host_port) {
  const std::size_t port = host_port.rfind(':');
  const bool plain =
      host_port.find(':') == port || host_port.starts_with('[') || host_port.find("://") != host_port.npos;
  if (plain) return {};
  return std::string("[").append(host_port.substr(0, port)).append("]").append(host_port.substr(port));
}

std::string printable(std::string_view text, std::size_t longest) {
  std::string result;
  while (!text.empty()) {
    const std::size_t length = character(text);
    const bool prints = length > 1 || (length == 1 && text[0] >= ' ' && text[0] != 0x7f);
    if (result.size() + std::max<std::size_t>(length, 1) > longest) break;
    result += prints ? text.substr(0, length) : "?";
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return result;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

}  // namespace rejoin
