#include "base/ring_links.h"

#include <algorithm>
#include <bit>

#include "base/fail.h"

namespace rejoin {

bool linked(const LinkRule& rule, std::uint32_t one, std::uint32_t other, std::uint32_t contributors,
            std::uint32_t members) {
  if (one == other || std::max(one, other) >= members) return false;
  if (rule.all(members)) return true;
  const std::uint32_t low = std::min(one, other), high = std::max(one, other);
  // So many before the lower one are lost, and so many before the higher one.
  for (std::uint32_t s = 0; s <= std::min(rule.spares, low); ++s)
    for (std::uint32_t t = s; t <= rule.spares && t - s < high - low; ++t)
      if (high - t == low - s + 1 || std::has_single_bit((high - t) ^ (low - s))) return true;
  // Where a ring closes: all before the lower one are lost, and all behind the higher one. Of the contributors' ring
  // the last is one further when a member that catches up is promoted.
  const auto closes = [&](std::uint32_t ring) {
    const std::uint32_t last = ring - 1;
    return low + (high > last ? high - last : last - high) <= rule.spares;
  };
  return closes(members) || closes(contributors);
}

std::vector<std::uint32_t> links_of(const LinkRule& rule, std::uint32_t position, std::uint32_t contributors,
                                    std::uint32_t members) {
  REJOIN_CHECK(contributors >= 1 && contributors <= members && position < members,
               "position {} of {} members, {} of them contributors", position, members, contributors);
  std::vector<std::uint32_t> candidates, links;
  const auto around = [&](std::int64_t middle) {
    const std::int64_t spares = rule.spares;
    for (std::int64_t one = middle - spares; one <= middle + spares; ++one)
      if (one >= 0 && one < std::int64_t{members}) candidates.push_back(static_cast<std::uint32_t>(one));
  };
  if (rule.all(members)) {
    for (std::uint32_t one = 0; one < members; ++one) candidates.push_back(one);
  } else {
    for (std::int64_t bit = 1; bit < std::int64_t{members}; bit *= 2) around(position - bit), around(position + bit);
    for (const std::int64_t end : {std::int64_t{0}, std::int64_t{contributors} - 1, std::int64_t{members} - 1})
      around(end);
  }
  std::ranges::sort(candidates);
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  std::ranges::copy_if(candidates, std::back_inserter(links),
                       [&](auto other) { return linked(rule, position, other, contributors, members); });
  return links;
}

}  // namespace rejoin
