#include "catchup/planner.h"

#include <algorithm>

namespace rejoin::catchup {

namespace {

constexpr std::uint32_t kOfFellows = 4;  // a fellow's window is this part of a contributor's: there are more of them

constexpr std::uint32_t kOpening = 4;     // a contributor's window at first; it opens by one with each slice of its
constexpr std::int64_t kRecent = 8;       // slices, whose arrival tells how fast they come now
constexpr std::size_t kLately = 64;       // slices of each source as a mean: what came before counts for half
constexpr std::uint32_t kAllFellows = 9;  // of so many joiners each asks all others
constexpr std::uint32_t kSpoilt = 8;      // slices that came damaged one after the other, until a source is not asked

}  // namespace

std::vector<std::uint32_t> fellows_of(std::uint32_t own, std::uint32_t of) {
  std::vector<std::uint32_t> fellows;
  for (std::uint32_t behind = 1; behind < of; behind = of <= kAllFellows ? behind + 1 : behind * 2)
    fellows.push_back((own + behind) % of);
  return fellows;
}

Planner::Planner(std::uint32_t slices, std::uint32_t window)
    : total_(slices),
      widest_(window),
      window_(window),
      last_(slices),
      priorities_(slices, kNotWaiting),
      offers_(slices),
      have_(slices) {
  for (std::uint32_t i = 0; i < slices; ++i) wait(i, i);
}

// Where a slice that waits belongs.
Planner::Queue& Planner::queue_of(std::uint32_t slice) {
  return offers_[slice] > 0 ? offered_ : is_own(slice) ? own_turn_ : others_turns_;
}

void Planner::wait(std::uint32_t slice, Priority priority) {
  priorities_[slice] = priority;
  queue_of(slice).emplace(priority, slice);
  for (auto& [id, source] : sources_)
    if (source.fellow && source.offers[slice]) source.offered.emplace(priority, slice);
}

void Planner::take(std::uint32_t slice) {
  queue_of(slice).erase(priorities_[slice]);
  for (auto& [id, source] : sources_)
    if (source.fellow && source.offers[slice]) source.offered.erase(priorities_[slice]);
  priorities_[slice] = kNotWaiting;
}

void Planner::on_present(std::uint32_t slice) {
  if (!waits(slice)) return;
  take(slice);
  have_[slice] = true;
  ++arrived_;
}

void Planner::set_turn(std::uint32_t own, std::uint32_t of) {
  if (own == own_ && of == of_) return;
  own_ = own;
  of_ = std::max(1u, of);
  own_turn_.merge(others_turns_);
  for (auto at = own_turn_.begin(); at != own_turn_.end();) {
    const auto here = at++;
    if (!is_own(here->second)) others_turns_.insert(own_turn_.extract(here));
  }
}

// Of a source, as a mean: what a new one is taken to be capable of.
std::uint32_t Planner::usually_delivered() const {
  std::uint64_t all = 0;
  for (const auto& [id, source] : sources_) all += source.delivered;
  return static_cast<std::uint32_t>(all / std::max<std::size_t>(1, sources_.size()));
}

void Planner::count(Source& source) {
  ++source.arrived;
  ++source.delivered;
  if (++counted_ < kLately * sources_.size()) return;
  counted_ = 0;
  for (auto& [id, one] : sources_) one.delivered /= 2;
}

void Planner::on_source_up(ReplicaId source, std::size_t distance) {
  sources_.try_emplace(source, Source{.delivered = usually_delivered()}).first->second.distance = distance;
}

void Planner::on_fellow_up(ReplicaId fellow) {
  sources_.try_emplace(fellow,
                       Source{.fellow = true, .offers = std::vector<bool>(total_), .delivered = usually_delivered()});
}

void Planner::on_offered(ReplicaId fellow, std::uint32_t slice) {
  auto found = sources_.find(fellow);
  if (found == sources_.end() || !found->second.fellow || slice >= total_ || found->second.offers[slice]) return;
  if (waits(slice)) queue_of(slice).erase(priorities_[slice]);
  found->second.offers[slice] = true;
  ++offers_[slice];
  if (!waits(slice)) return;
  queue_of(slice).emplace(priorities_[slice], slice);
  found->second.offered.emplace(priorities_[slice], slice);
}

void Planner::on_source_down(ReplicaId source) {
  auto gone = sources_.extract(source);
  if (gone.empty()) return;
  const auto& offers = gone.mapped().offers;
  for (std::uint32_t slice = 0; slice < offers.size(); ++slice) {
    if (!offers[slice]) continue;
    const bool waiting = waits(slice);
    if (waiting) queue_of(slice).erase(priorities_[slice]);
    --offers_[slice];
    if (waiting) queue_of(slice).emplace(priorities_[slice], slice);
  }
  for (auto slice : gone.mapped().under_way) wait(slice, first_--);
}

// A contributor within reach that sends what is sound, besides this one.
bool Planner::others_can(ReplicaId than) const {
  return std::ranges::any_of(sources_, [&](const auto& one) {
    const auto& [id, source] = one;
    return id != than && !source.fellow && source.distance <= reach_ && source.spoilt < kSpoilt;
  });
}

void Planner::on_sound(ReplicaId source, std::uint32_t slice) {
  spoilt_.erase(slice);
  if (const auto found = sources_.find(source); found != sources_.end()) found->second.spoilt = 0;
}

bool Planner::on_spoilt(ReplicaId source, std::uint32_t slice) {
  spoilt_[slice] = source;
  const auto found = sources_.find(source);
  if (found == sources_.end()) return false;
  Source& its = found->second;  // what it has delivered decides on its share
  its.arrived -= std::min(its.arrived, 1u);
  its.delivered -= std::min(its.delivered, 1u);
  return ++its.spoilt == kSpoilt && !its.fellow;
}

std::vector<std::uint32_t> Planner::next(ReplicaId source, std::size_t sources, bool idle) {
  std::vector<std::uint32_t> slices;
  auto found = sources_.find(source);
  std::size_t left = own_turn_.size() + others_turns_.size() + offered_.size();
  if (left == 0 || found == sources_.end() || found->second.distance > reach_) return slices;
  std::size_t near = 0;
  std::uint64_t weights = 0;  // of those; one that is expected weighs as much as the mean of them
  for (const auto& [id, one] : sources_) {
    left += one.under_way.size();
    if (one.distance > reach_) continue;
    ++near;
    weights += one.weight();
  }
  Source& asked = found->second;
  const bool others = !asked.fellow && !idle && others_can(source);
  if (others && asked.spoilt >= kSpoilt) return slices;
  const auto passed_over = [&](const Queue::value_type& one) {
    const auto spoilt = spoilt_.find(one.second);
    return others && spoilt != spoilt_.end() && spoilt->second == source;
  };
  const std::uint64_t all = weights * std::max(sources, near), share = (left * asked.weight() * near + all - 1) / all;
  const auto ask = [&](std::uint32_t slice) {
    take(slice);
    asked.under_way.insert(slice);
    slices.push_back(slice);
  };
  const std::size_t window =
      asked.fellow ? std::max(1u, window_ / kOfFellows) : std::min(window_, kOpening + asked.arrived);
  Queue& first = asked.fellow ? asked.offered : own_turn_;
  while (asked.under_way.size() < std::min<std::uint64_t>(window, share)) {
    const auto at = std::ranges::find_if_not(first, passed_over);
    if (at == first.end()) break;
    ask(at->second);
  }
  Queue& rest = others_turns_.empty() ? offered_ : others_turns_;
  if (asked.fellow || rest.empty()) return slices;
  if (asked.under_way.empty()) {
    if (granted_ == 0 && idle && granted_at_ != now_) {  // once for all contributors
      granted_ = last_grant_ = std::clamp(2 * last_grant_, 1u, total_);
      granted_at_ = now_;
    }
    if (granted_ == 0 && (!slow_ || out_of_turn_.size() >= turn())) return slices;
  }
  const std::size_t at_once = std::min<std::size_t>(window, std::max<std::size_t>(1, granted_));
  while (!rest.empty() && asked.under_way.size() < at_once) {
    // From the end, where their own joiners come last; fellows that do the same begin beside it.
    auto slice = rest.rbegin();
    std::advance(slice, std::min<std::size_t>(own_, rest.size() - 1));
    if (passed_over(*slice)) return slices;
    const std::uint32_t chosen = slice->second;
    out_of_turn_.insert(chosen);
    ask(chosen);
    if (granted_ == 0) break;
    --granted_;
  }
  return slices;
}

bool Planner::on_arrived(ReplicaId source, std::uint32_t slice) {
  auto found = sources_.find(source);
  if (found == sources_.end() || found->second.under_way.erase(slice) == 0) return false;
  if (!have_[slice]) ++arrived_;
  have_[slice] = true;
  if (found->second.fellow) granted_ = last_grant_ = 0;
  count(found->second);
  if (!out_of_turn_.contains(slice)) {
    ++plain_;
    recent_.push_back(now_);
    if (recent_.size() > kRecent) recent_.pop_front();
  }
  if (++arrived_since_ >= window_ && window_ < widest_) {
    ++window_;
    arrived_since_ = 0;
  }
  return true;
}

void Planner::on_time(TimePoint now) {
  if (!begun_) begun_ = now;
  now_ = now;
  slow_ = recent_.size() == kRecent &&
          2 * kRecent * (now - *begun_).count() < static_cast<std::int64_t>(plain_) * (now - recent_.front()).count();
}

std::size_t Planner::under_way(ReplicaId source) const {
  const auto found = sources_.find(source);
  return found == sources_.end() ? 0 : found->second.under_way.size();
}

void Planner::narrow() {
  window_ = std::max(1u, window_ / 2);
  arrived_since_ = 0;
}

void Planner::on_again(std::uint32_t slice) {
  if (have_[slice]) --arrived_;
  have_[slice] = false;
  for (auto& [id, source] : sources_) source.under_way.erase(slice);
  if (!waits(slice)) wait(slice, last_++);
  ++refetched_;
}

}  // namespace rejoin::catchup
