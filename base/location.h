// Says where a machine stands, by the names of what it is in, from the widest to the narrowest, as in
// "dc/room/rack/host".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rejoin {

class Location {
 public:
  static constexpr std::size_t kMostLevels = 8, kLongestName = 63;
  static constexpr std::size_t kLongest = kMostLevels * (kLongestName + 1);

  Location() = default;  // an unknown location
  static Result<Location> parse(std::string_view text);
  std::string text() const;
  bool known() const { return !names_.empty(); }
  std::size_t levels() const { return names_.size(); }
  bool operator==(const Location&) const = default;

  // Returns what both are in.
  Location common(const Location& other) const;
  // Returns how many levels above the narrowest the first one is that both are in: 0 on one host, 1 in one rack, and so
  // on. An unknown location is as far away as another data center.
  std::size_t distance(const Location& other) const;

 private:
  std::vector<std::string> names_;
};

// Returns the name at this level, from 0 on, of a location as text; empty below its last level.
std::string_view name_at(std::string_view location, std::size_t level);

}  // namespace rejoin
