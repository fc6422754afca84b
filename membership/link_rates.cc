#include "membership/link_rates.h"

#include <algorithm>

namespace rejoin::membership {

namespace {

constexpr std::size_t kMostLinks = 64;  // of one replica: who tells of more tells nonsense

}  // namespace

LinkRates::LinkRates(const Told& told) {
  for (const auto& one : told)
    if (one.rate() <= kFastest && links_.size() < kMostLinks)
      keep_lower(Link{one.incarnation(), static_cast<CoarseRate>(one.rate()), one.rank()});
}

void LinkRates::to(Told* told) const {
  for (const auto& link : links_) {
    auto& one = *told->Add();
    one.set_incarnation(link.incarnation);
    one.set_rate(link.rate);
    one.set_rank(link.rank);
  }
}

void LinkRates::keep_lower(const Link& one) {
  const auto place = std::ranges::lower_bound(links_, one.incarnation, {}, &Link::incarnation);
  if (place == links_.end() || place->incarnation != one.incarnation) links_.insert(place, one);
  else if (std::pair(one.rate, one.rank) < std::pair(place->rate, place->rank)) *place = one;
}

void LinkRates::keep_lower(const LinkRates& other) {
  for (const auto& link : other.links_) keep_lower(link);
}

std::optional<LinkRates::Link> LinkRates::of(std::uint64_t incarnation) const {
  const auto place = std::ranges::lower_bound(links_, incarnation, {}, &Link::incarnation);
  return place == links_.end() || place->incarnation != incarnation ? std::nullopt : std::optional(*place);
}

void SlowLinkFinder::look(const std::vector<RingLink>& links, Step step, TimePoint now) {
  const auto before = std::exchange(slowest_, std::nullopt);
  named_ = false;
  if (links.size() < 2) return;
  const auto known = [&](const RingLink& link) {
    return before && before->link.from == link.from && before->link.to == link.to;
  };
  // Of those that are alike the one that it was.
  const auto slowest = std::ranges::min_element(
      links, {}, [&](const RingLink& link) { return std::pair(link.rate, known(link) ? 0 : 1); });
  std::vector<CoarseRate> rates;
  for (const auto& link : links) rates.push_back(link.rate);
  const auto median = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::ranges::nth_element(rates, median);
  if (slowest->rate + (known(*slowest) ? 1 : 2) > *median) return;
  slowest_ = Found{*slowest, *median, step, now};
  if (known(*slowest)) slowest_->since = before->since, slowest_->since_at = before->since_at;
  named_ = now - slowest_->since_at >= patience_;
}

}  // namespace rejoin::membership
