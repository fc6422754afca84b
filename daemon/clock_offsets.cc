#include "daemon/clock_offsets.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace rejoin::daemon {

namespace {

constexpr std::int64_t kWindow = 10'000'000'000;  // ns
constexpr double kMostDrift = 1e-4;               // of one clock against another, where it can't be measured

// Both are what a file says; no sum of them may overflow.
std::int64_t difference(std::int64_t one, std::int64_t other) {
  std::int64_t result = 0;
  if (!__builtin_sub_overflow(one, other, &result)) return result;
  return one > other ? std::numeric_limits<std::int64_t>::max() / 4 : std::numeric_limits<std::int64_t>::min() / 4;
}

}  // namespace

ClockOffsets::ClockOffsets(const std::vector<StampedMessage>& messages, std::uint64_t reference)
    : reference_(reference) {
  std::set<std::uint64_t> clocks;
  for (const auto& one : messages) clocks.insert({one.from, one.to});
  // Those that talk with the reference, then those that talk with these, and so on.
  std::vector<std::uint64_t> reached{reference};
  for (std::size_t i = 0; i < reached.size(); ++i)
    for (auto clock : clocks) {
      if (clock == reference || ways_.contains(clock)) continue;
      auto way = estimate(messages, clock, reached[i]);
      if (!way) continue;
      ways_[clock] = std::move(*way);
      reached.push_back(clock);
    }
}

// What the messages of each window say of its middle, if the offset changes at this rate.
std::vector<ClockOffsets::Estimate> ClockOffsets::windows(const std::vector<StampedMessage>& messages,
                                                          std::uint64_t clock, std::uint64_t other, double rate) {
  struct Bounds {
    std::int64_t least = std::numeric_limits<std::int64_t>::min(), most = std::numeric_limits<std::int64_t>::max();
  };
  std::map<std::int64_t, Bounds> all;  // by the clock's time
  const auto at_middle = [&](std::int64_t offset, std::int64_t at) {
    const std::int64_t middle = at / kWindow * kWindow + kWindow / 2;
    return difference(offset, std::llround(rate * static_cast<double>(at - middle)));
  };
  for (const auto& one : messages) {
    if (one.from == clock && one.to == other) {
      auto& most = all[one.sent_ns / kWindow].most;
      most = std::min(most, at_middle(difference(one.heard_ns, one.sent_ns), one.sent_ns));
    } else if (one.from == other && one.to == clock) {
      auto& least = all[one.heard_ns / kWindow].least;
      least = std::max(least, at_middle(difference(one.sent_ns, one.heard_ns), one.heard_ns));
    }
  }
  std::vector<Estimate> estimates;
  for (const auto& [number, bounds] : all) {
    if (bounds.least == Bounds{}.least || bounds.most == Bounds{}.most) continue;
    const std::int64_t width = difference(bounds.most, bounds.least);
    estimates.push_back({number * kWindow + kWindow / 2, bounds.least + width / 2, std::abs(width) / 2 + 1});
  }
  return estimates;
}

// First as if no clock drifted, which shows how they do.
std::optional<ClockOffsets::Way> ClockOffsets::estimate(const std::vector<StampedMessage>& messages,
                                                        std::uint64_t clock, std::uint64_t other) {
  Way way{.towards = other};
  way.estimates = windows(messages, clock, other, 0);
  if (way.estimates.empty()) return std::nullopt;
  const Estimate first = way.estimates.front(), last = way.estimates.back();
  if (const auto apart = static_cast<double>(last.at - first.at); last.at - first.at >= 2 * kWindow) {
    const double drift = static_cast<double>(difference(last.offset, first.offset)) / apart;
    way.rate = std::clamp(drift, -kMostDrift, kMostDrift);
    way.rate_error =
        std::min(kMostDrift,
                 (static_cast<double>(first.error + last.error) + kMostDrift * static_cast<double>(kWindow)) / apart);
    way.estimates = windows(messages, clock, other, way.rate);
  }
  return way;
}

std::optional<ClockOffsets::Time> ClockOffsets::on_reference(std::uint64_t clock, std::int64_t at) const {
  Time time{at, 0};
  while (clock != reference_) {
    const auto found = ways_.find(clock);
    if (found == ways_.end()) return std::nullopt;
    const Way& way = found->second;
    const auto& all = way.estimates;
    const auto next = std::ranges::lower_bound(all, time.at, {}, &Estimate::at);
    const Estimate& after = next == all.end() ? all.back() : *next;
    const Estimate& before = next == all.begin() ? all.front() : *(next - 1);
    const Estimate& near =
        std::abs(difference(time.at, before.at)) < std::abs(difference(after.at, time.at)) ? before : after;
    const auto away = static_cast<double>(difference(time.at, near.at));
    const double offset = static_cast<double>(near.offset) + way.rate * away;
    const double error = static_cast<double>(std::max(before.error, after.error)) +
                         way.rate_error * std::max(std::abs(away), static_cast<double>(kWindow) / 2);
    constexpr double most = 4e18;
    time.at = difference(time.at, -std::llround(std::clamp(offset, -most, most)));
    time.error += std::llround(std::min(error, most / 8));
    clock = way.towards;
  }
  return time;
}

}  // namespace rejoin::daemon
