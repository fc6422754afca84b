#include "base/location.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/bytes.h"
#include "base/fail.h"

namespace rejoin {

Result<Location> Location::parse(std::string_view text) {
  const auto wrong = [&](const std::string& why) {
    return fail(ErrorCode::invalid_argument,
                "'{}' is not a location: {}; it names what the machine is in, from the widest to the narrowest, with a "
                "'/' between, as in dc1/room2/rack3/host4",
                printable(std::string(text.substr(0, kLongest)), kLongest), why);
  };
  const auto allowed = [](unsigned char letter) {
    return std::isalnum(letter) != 0 || letter == '.' || letter == '_' || letter == '-';
  };
  Location location;
  location.names_ = split(text, '/');
  if (location.levels() > kMostLevels)
    return wrong(fmt::format("it has {} names, and {} at most are kept apart", location.levels(), kMostLevels));
  for (const auto& name : location.names_) {
    if (name.empty()) return wrong("a name in it is empty");
    if (name.size() > kLongestName)
      return wrong(fmt::format("'{}…' has {} letters, and {} are the most", printable(name.substr(0, 16), 16),
                               name.size(), kLongestName));
    if (!std::ranges::all_of(name, allowed))
      return wrong(fmt::format("'{}' has other characters than letters, digits, '.', '_' and '-'",
                               printable(name, kLongestName)));
  }
  return location;
}

std::string Location::text() const { return fmt::format("{}", fmt::join(names_, "/")); }

Location Location::common(const Location& other) const {
  const auto end = std::ranges::mismatch(names_, other.names_).in1;
  Location both;
  both.names_.assign(names_.begin(), end);
  return both;
}

std::size_t Location::distance(const Location& other) const {
  return std::max(levels(), other.levels()) - common(other).levels();
}

std::string_view name_at(std::string_view location, std::size_t level) {
  for (; level > 0; --level) {
    const auto border = location.find('/');
    if (border == std::string_view::npos) return {};
    location.remove_prefix(border + 1);
  }
  return location.substr(0, location.find('/'));
}

}  // namespace rejoin
