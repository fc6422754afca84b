#include "daemon/clock_offsets.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace rejoin::daemon {

namespace {

constexpr std::int64_t kWindow = 10'000'000'000;  // ns
constexpr double kMostDrift = 1e-4;               // of one clock against another, where it can't be measured
constexpr double kMostSlew = 0.1;                 // … while its time of the day is put right: adjtimex(2)'s most
constexpr double kJump = 1e8;                     // ns: what stood for less is an error like others

// Both are what a file says; no sum of them may overflow.
std::int64_t difference(std::int64_t one, std::int64_t other) {
  std::int64_t result = 0;
  if (!__builtin_sub_overflow(one, other, &result)) return result;
  return one > other ? std::numeric_limits<std::int64_t>::max() / 4 : std::numeric_limits<std::int64_t>::min() / 4;
}

}  // namespace

ClockOffsets::ClockOffsets(const std::vector<StampedMessage>& messages, std::uint64_t reference)
    : reference_(reference) {
  std::map<std::uint64_t, std::map<std::uint64_t, std::vector<StampedMessage>>> all;  // of each clock with each other
  for (const auto& one : messages) {
    all[one.from][one.to].push_back(one);
    all[one.to][one.from].push_back(one);
  }
  // Those that talk with the reference, then those that talk with these, and so on.
  std::vector<std::uint64_t> reached{reference};
  for (std::size_t i = 0; i < reached.size(); ++i)
    for (const auto& [clock, with_it] : all[reached[i]]) {
      if (clock == reference || ways_.contains(clock)) continue;
      auto way = estimate(with_it, clock, reached[i]);
      if (!way) continue;
      ways_[clock] = std::move(*way);
      reached.push_back(clock);
    }
}

// Where a message says that the offset is more than it can have become, or less, one of the two clocks has stood. The
// messages just before it that fit only what is known now are of the new era, too.
std::vector<ClockOffsets::Era> ClockOffsets::eras_of(const std::vector<StampedMessage>& messages, std::uint64_t clock) {
  std::vector<Bound> bounds;
  for (const auto& one : messages)
    if (one.from == clock) bounds.push_back({one.sent_ns, difference(one.heard_ns, one.sent_ns), true});
    else bounds.push_back({one.heard_ns, difference(one.sent_ns, one.heard_ns), false});
  std::ranges::stable_sort(bounds, {}, &Bound::at);
  constexpr double none = std::numeric_limits<double>::infinity();
  double least = -none, most = none;
  const auto take = [&](const Bound& one) {
    if (one.most) most = std::min(most, static_cast<double>(one.offset));
    else least = std::max(least, static_cast<double>(one.offset));
  };
  std::vector<Era> eras(bounds.empty() ? 0 : 1);
  std::int64_t last = 0;
  for (const auto& one : bounds) {
    const double slewed = kMostSlew * static_cast<double>(difference(one.at, last));
    const auto offset = static_cast<double>(one.offset);
    least -= slewed, most += slewed, last = one.at;
    if (one.most ? offset < least - kJump : offset > most + kJump) {
      auto& before = eras.back().bounds;
      auto fit = before.end();
      const auto far = [&](const Bound& each) {
        const auto its = static_cast<double>(each.offset);
        return each.most ? its > most + kJump : its < least - kJump;
      };
      while (fit != before.begin() && far(*(fit - 1))) --fit;
      std::vector<Bound> behind(fit, before.end());
      before.erase(fit, before.end());
      eras.push_back({.bounds = std::move(behind)});
      least = -none, most = none;
      for (const auto& each : eras.back().bounds) take(each);
    }
    take(one);
    eras.back().bounds.push_back(one);
  }
  return eras;
}

// What the messages of each window say of its middle, if the offset changes at this rate.
std::vector<ClockOffsets::Estimate> ClockOffsets::windows(const std::vector<Bound>& bounds, double rate) {
  struct Interval {
    std::int64_t least = std::numeric_limits<std::int64_t>::min(), most = std::numeric_limits<std::int64_t>::max();
  };
  std::map<std::int64_t, Interval> all;  // by the clock's time
  for (const auto& one : bounds) {
    const std::int64_t middle = one.at / kWindow * kWindow + kWindow / 2;
    const std::int64_t offset = difference(one.offset, std::llround(rate * static_cast<double>(one.at - middle)));
    auto& its = all[one.at / kWindow];
    if (one.most) its.most = std::min(its.most, offset);
    else its.least = std::max(its.least, offset);
  }
  std::vector<Estimate> estimates;
  for (const auto& [number, its] : all) {
    if (its.least == Interval{}.least || its.most == Interval{}.most) continue;
    const std::int64_t width = difference(its.most, its.least);
    estimates.push_back({number * kWindow + kWindow / 2, its.least + width / 2, std::abs(width) / 2 + 1});
  }
  return estimates;
}

// First as if no clock drifted, which shows how they do: best in the longest time in which none stood.
std::optional<ClockOffsets::Way> ClockOffsets::estimate(const std::vector<StampedMessage>& messages,
                                                        std::uint64_t clock, std::uint64_t other) {
  Way way{.towards = other, .eras = eras_of(messages, clock)};
  for (auto& era : way.eras) era.estimates = windows(era.bounds, 0);
  std::erase_if(way.eras, [](const Era& era) { return era.estimates.empty(); });
  if (way.eras.empty()) return std::nullopt;
  const auto length = [](const Era& era) { return era.estimates.back().at - era.estimates.front().at; };
  const Era& longest = *std::ranges::max_element(way.eras, {}, length);
  const Estimate first = longest.estimates.front(), last = longest.estimates.back();
  if (const auto apart = static_cast<double>(length(longest)); length(longest) >= 2 * kWindow) {
    const double drift = static_cast<double>(difference(last.offset, first.offset)) / apart;
    way.rate = std::clamp(drift, -kMostDrift, kMostDrift);
    way.rate_error =
        std::min(kMostDrift,
                 (static_cast<double>(first.error + last.error) + kMostDrift * static_cast<double>(kWindow)) / apart);
    for (auto& era : way.eras) era.estimates = windows(era.bounds, way.rate);
  }
  for (auto& era : way.eras) {
    era.begins = era.bounds.front().at, era.ends = era.bounds.back().at;
    era.bounds = {};
  }
  return way;
}

ClockOffsets::Time ClockOffsets::Way::at_other(std::size_t era, std::int64_t at) const {
  const auto& all = eras[era].estimates;
  const auto next = std::ranges::lower_bound(all, at, {}, &Estimate::at);
  const Estimate& after = next == all.end() ? all.back() : *next;
  const Estimate& before = next == all.begin() ? all.front() : *(next - 1);
  const Estimate& near = std::abs(difference(at, before.at)) < std::abs(difference(after.at, at)) ? before : after;
  const auto away = static_cast<double>(difference(at, near.at));
  const double offset = static_cast<double>(near.offset) + rate * away;
  const double error = static_cast<double>(std::max(before.error, after.error)) +
                       rate_error * std::max(std::abs(away), static_cast<double>(kWindow) / 2);
  constexpr double most = 4e18;
  return {difference(at, -std::llround(std::clamp(offset, -most, most))), std::llround(std::min(error, most / 8))};
}

// By the other clock, at most all of this era and at least all of the next one. What happens while the other clock
// stands is at one of its times.
std::int64_t ClockOffsets::Way::between(std::size_t era) const {
  return std::max(at_other(era, eras[era].ends).at, at_other(era + 1, eras[era + 1].begins).at);
}

ClockOffsets::Time ClockOffsets::Way::at_other(std::int64_t at) const {
  std::size_t era = 0;
  while (era + 1 < eras.size() && eras[era + 1].begins <= at) ++era;
  Time time = at_other(era, at);
  if (era + 1 < eras.size()) time.at = std::min(time.at, between(era));
  if (era > 0) time.at = std::max(time.at, between(era - 1));
  return time;
}

std::optional<ClockOffsets::Time> ClockOffsets::on_reference(std::uint64_t clock, std::int64_t at) const {
  Time time{at, 0};
  while (clock != reference_) {
    const auto found = ways_.find(clock);
    if (found == ways_.end()) return std::nullopt;
    const Time next = found->second.at_other(time.at);
    time = {next.at, time.error + next.error};
    clock = found->second.towards;
  }
  return time;
}

std::int64_t ClockOffsets::stood(std::uint64_t clock) const {
  const auto found = ways_.find(clock);
  if (found == ways_.end()) return 0;
  const Way& way = found->second;
  std::int64_t all = 0;
  for (std::size_t era = 1; era < way.eras.size(); ++era) {
    const std::int64_t begins = way.eras[era].begins;
    all += std::clamp<std::int64_t>(difference(way.at_other(era, begins).at, way.at_other(era - 1, begins).at), 0,
                                    std::int64_t{1} << 52);
  }
  return all;
}

}  // namespace rejoin::daemon
