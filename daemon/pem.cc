#include "daemon/pem.h"

#include <algorithm>
#include <optional>

#include "base/fail.h"

namespace rejoin::daemon {

namespace {

constexpr std::string_view kFirstMark = "-----BEGIN", kLastMark = "-----END", kDashes = "-----",
                           kSpaces = " \t\r\n\v\f";

std::string_view without_spaces(std::string_view line) {
  const auto first = line.find_first_not_of(kSpaces);
  if (first == line.npos) return {};
  return line.substr(first, line.find_last_not_of(kSpaces) - first + 1);
}

// Of the first or last line of a block, behind `mark`; empty: it is none.
std::string_view kind_in(std::string_view line, std::string_view mark) {
  line.remove_prefix(mark.size());
  if (!line.starts_with(' ') || line.size() <= 1 + kDashes.size() || !line.ends_with(kDashes)) return {};
  return line.substr(1, line.size() - 1 - kDashes.size());
}

template <typename... Arguments>
auto misses(fmt::format_string<Arguments...> where, Arguments&&... arguments) {
  return fail(ErrorCode::invalid_argument, where, std::forward<Arguments>(arguments)...);
}

// Of a file's last line the beginning may be all that is there.
bool begins_block(std::string_view line, bool cut) {
  return line.starts_with(kFirstMark) || (cut && !line.empty() && kFirstMark.starts_with(line));
}

}  // namespace

Result<std::vector<PemBlock>> pem_blocks(std::string_view text) {
  constexpr std::string_view byte_order = "\xef\xbb\xbf";
  if (text.starts_with(byte_order)) text.remove_prefix(byte_order.size());
  if (without_spaces(text).empty()) return misses("it is empty");
  if (text.find(kFirstMark) == text.npos) return std::vector<PemBlock>{};  // as of a file in another form
  struct Begun {
    std::string_view first;
    std::size_t line = 0, at = 0;
  };
  std::vector<PemBlock> all;
  std::optional<Begun> begun;
  std::size_t number = 0;  // of the line
  for (std::size_t at = 0, next = 0; at < text.size(); at = next) {
    ++number;
    next = std::min(text.find('\n', at), text.size() - 1) + 1;
    const std::string_view line = without_spaces(text.substr(at, next - at));
    const bool cut = text[next - 1] != '\n';
    if (line.find('\0') != line.npos) return misses("line {} has a byte of value 0", number);
    if (begins_block(line, cut && !begun)) {
      if (begun) return misses("its block {} (line {}) has no end", all.size() + 1, begun->line);
      begun = Begun{line, number, at};
    } else if (line.starts_with(kLastMark)) {
      if (!begun) return misses("its block {}, which ends in line {}, has no beginning", all.size() + 1, number);
      const auto kind = kind_in(begun->first, kFirstMark), ended = kind_in(line, kLastMark);
      if (ended.empty() && cut) break;
      if (kind.empty() || kind != ended)
        return misses("its block {} (line {}) has another end than its beginning", all.size() + 1, begun->line);
      all.push_back({kind, text.substr(begun->at, next - begun->at), begun->line});
      begun.reset();
    }
  }
  if (begun) return misses("it ends in the midst of its block {} (line {})", all.size() + 1, begun->line);
  return all;
}

}  // namespace rejoin::daemon
