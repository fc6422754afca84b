// Where a machine stands: the names of what it is in, from the widest to the narrowest, as in "dc/room/rack/host".
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

  Location() = default;  // nowhere that is known
  static Result<Location> parse(std::string_view text);
  std::string text() const;
  bool known() const { return !names_.empty(); }
  std::size_t levels() const { return names_.size(); }
  bool operator==(const Location&) const = default;

  // What both are in.
  Location common(const Location& other) const;
  // How many levels up from the narrowest one the narrowest is that both are in: 0 on one host, 1 in one rack, and so
  // on. What is not known is as far away as another data center.
  std::size_t distance(const Location& other) const;

 private:
  std::vector<std::string> names_;
};

// Of a location as text: what it is in at this level, from 0 on; empty below its last one.
std::string_view name_at(std::string_view location, std::size_t level);

}  // namespace rejoin
