#include "membership/versions.h"

#include <fmt/format.h>

namespace rejoin::membership {

std::string Versions::text() const {
  return oldest == newest ? fmt::format("{}", newest) : fmt::format("{} to {}", oldest, newest);
}

std::optional<std::uint32_t> agreed(const Versions& one, const Versions& other) {
  const std::uint32_t newest = std::min(one.newest, other.newest);
  if (newest < std::max(one.oldest, other.oldest)) return std::nullopt;
  return newest;
}

std::string why_refused(std::string_view who, const Versions& theirs, std::string_view self, const Versions& own) {
  const bool they_are_older = theirs.newest < own.newest;
  return fmt::format("{} speaks protocol {}, and {} {}: upgrade {} first, to a release that speaks protocol {}", who,
                     theirs.text(), self, own.text(), they_are_older ? who : self,
                     (they_are_older ? own : theirs).text());
}

}  // namespace rejoin::membership
