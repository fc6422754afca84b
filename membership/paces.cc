#include "membership/paces.h"

#include <algorithm>

#include "base/lower_median.h"

namespace rejoin::membership {

namespace {

constexpr std::uint64_t kLongestUnmeasured = 4 * Paces::kWindow;
constexpr std::uint64_t kLongest = std::uint64_t{1} << 40;  // µs: a step of twelve days

}  // namespace

void Paces::on_step(Step step, const std::vector<Measured>& contributors, TimePoint now) {
  const auto is_in = [&](ReplicaId replica, const auto& has) {
    return std::ranges::any_of(contributors, [&](const Measured& one) { return one.replica == replica && has(one); });
  };
  std::erase_if(windows_, [&](const auto& one) {
    return !is_in(one.first, [&](const Measured& m) { return m.incarnation == one.second.incarnation; });
  });
  std::erase_if(stragglers_,
                [&](const Straggler& one) { return !is_in(one.replica, [](const auto&) { return true; }); });
  const bool all = std::ranges::all_of(contributors, [](const Measured& one) {
    return one.compute_us > 0 && one.compute_us < kLongest && one.samples > 0;
  });
  if (!all) {
    if (++unmeasured_ >= kLongestUnmeasured) windows_.clear(), stragglers_.clear();
    return;
  }
  unmeasured_ = 0;
  for (const auto& one : contributors) {
    Window& window = windows_[one.replica];
    window.incarnation = one.incarnation;
    window.times[window.steps++ % kWindow] = std::max<std::uint64_t>(1, one.compute_us * 1'000'000 / one.samples);
  }
  find_stragglers(step, contributors, now);
}

std::optional<std::uint64_t> Paces::of(ReplicaId replica) const {
  const auto found = windows_.find(replica);
  if (found == windows_.end() || found->second.steps < kWindow) return std::nullopt;
  return lower_median<std::uint64_t>({found->second.times.begin(), found->second.times.end()});
}

void Paces::find_stragglers(Step step, const std::vector<Measured>& contributors, TimePoint now) {
  std::vector<std::uint64_t> paces;
  for (const auto& one : contributors) {
    const auto pace = of(one.replica);
    if (!pace) return;
    paces.push_back(*pace);
  }
  const std::uint64_t median = lower_median(paces);
  for (std::size_t i = 0; i < contributors.size(); ++i) {
    const auto found = std::ranges::find(stragglers_, contributors[i].replica, &Straggler::replica);
    const bool was = found != stragglers_.end();
    const double pace = static_cast<double>(paces[i]), behind = pace - static_cast<double>(median);
    const auto slower = static_cast<std::uint64_t>(pace / static_cast<double>(median) * 1000);
    const double behind_us = behind * static_cast<double>(contributors[i].samples) / 1e6;
    if (slower < (was ? kNoMore : kStraggles) || behind_us < (was ? kLeastUs / 2 : kLeastUs)) {
      if (was) stragglers_.erase(found);
    } else if (was) {
      found->slower = slower;
    } else {
      stragglers_.push_back({contributors[i].replica, slower, step, now});
    }
  }
  std::ranges::stable_sort(stragglers_, std::ranges::greater{}, &Straggler::slower);
}

}  // namespace rejoin::membership
