// Whom a joiner asks for which slices.
#include <algorithm>

#include "base/deadlines.h"
#include "base/events.h"
#include "catchup/joiner.h"

namespace rejoin::catchup {

namespace {

// Near sources are enough where what is left takes no longer than so many silences.
constexpr int kLongEnough = 8;

}  // namespace

void Joiner::set_distances(std::map<ReplicaId, std::size_t> distances) {
  if (distances != distances_) ranks_.reset();
  distances_ = std::move(distances);
}

// From 0 on. What is measured makes a difference where it is much: otherwise good sources would wait for noise. One
// that is not connected yet, or whose transport does not measure, may be near.
void Joiner::rank_sources() {
  if (ranks_) return;
  struct Far {
    std::size_t declared = 0;
    RoundTripLength measured = kNear;
    ReplicaId source;
    auto operator<=>(const Far&) const = default;
  };
  std::set<ReplicaId> sources;
  for (const auto& [source, known] : expected_) sources.insert(source);
  for (const auto& [source, connection] : sources_) sources.insert(source);
  std::vector<Far> all;
  for (auto source : sources) {
    const auto declared = distances_.find(source);
    const auto measured = round_trips_.find(source);
    all.push_back({declared == distances_.end() ? 0 : declared->second,
                   measured == round_trips_.end() ? kNear : measured->second, source});
  }
  std::ranges::sort(all);
  ranks_.emplace();
  std::size_t rank = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Far& before = all[i == 0 ? 0 : i - 1];
    if (all[i].declared != before.declared || much_longer(all[i].measured, before.measured)) ++rank;
    ranks_->emplace(all[i].source, rank);
  }
  for (const auto& [source, connection] : sources_)
    if (!stands_still(source)) planner_.on_source_up(source, distance_to(source));
}

std::size_t Joiner::distance_to(ReplicaId source) const { return ranks_->at(source); }

// The distances, ascending, of those that are connected, and of those that should be at once.
std::vector<std::size_t> Joiner::sources_soon() const {
  std::vector<std::size_t> distances;
  for (const auto& [source, connection] : sources_)
    if (!stands_still(source)) distances.push_back(distance_to(source));
  for (const auto& [source, known] : expected_)
    if (!sources_.contains(source) && known.missing_since && now_ - *known.missing_since < silence_ / 4)
      distances.push_back(distance_to(source));
  std::ranges::sort(distances);
  return distances;
}

// The nearest are asked; the next farther ones, too, where it would take long with these. Once they are, it stays so
// until others are the nearest.
void Joiner::choose_reach(const std::vector<std::size_t>& distances) {
  if (distances.empty() || planner_.all_arrived()) return;
  if (!reach_ || reach_->nearest != distances.front())
    reach_ = {.distance = distances.front(), .nearest = distances.front(), .arrived = planner_.arrived(), .at = now_};
  if (const Duration since = now_ - reach_->at; since >= silence_) {
    const auto farther = std::ranges::upper_bound(distances, reach_->distance);
    const auto came = std::int64_t{planner_.arrived()} - std::int64_t{reach_->arrived};
    const auto left = static_cast<std::int64_t>(verified_.size()) - std::int64_t{planner_.arrived()};
    if (farther != distances.end() && left * (since / silence_) > kLongEnough * came) {
      reach_->distance = *farther;
      events::emit("farther_sources", {{"distance", std::uint64_t{*farther}}});
    }
    reach_->arrived = planner_.arrived();
    reach_->at = now_;
  }
  planner_.reach_to(reach_->distance);
}

void Joiner::ask_for_slices() {
  if (update_of_void_ == view_.clock()) return;
  rank_sources();
  const auto distances = sources_soon();
  choose_reach(distances);
  const auto near =
      static_cast<std::size_t>(reach_ ? std::ranges::upper_bound(distances, reach_->distance) - distances.begin() : 0);
  const bool idle = now_ - came_at_ > std::max(deadlines::kIdleStream.of(silence_), kUsual * usual());
  for (const auto& [source, connection] : sources_)
    if (!ask(source, connection.endpoint, near, idle)) return;
  for (auto& [source, fellow] : fellows_) {
    const bool outstanding = planner_.under_way(source) > 0;
    if (!ask(source, fellow.endpoint, near, idle)) return;
    if (!outstanding) fellow.moved_at = now_;
  }
}

// False where the message could not be sent.
bool Joiner::ask(ReplicaId source, transport::EndpointId endpoint, std::size_t near, bool idle) {
  const auto slices = planner_.next(source, near, idle);
  if (slices.empty()) return true;
  proto::Stream message;
  auto& fetch = *message.mutable_fetch();
  std::map<std::uint32_t, std::uint32_t> regions;  // by memory range: which of the message's
  const auto add_target = [&](std::uint32_t slice) {
    const local::Part& range = view_.manifest().slices()[slice].range;
    for (std::uint32_t column = 0; column < view_.manifest().columns(range); ++column) {
      const local::ColumnLocation location = view_.location(range, column);
      const auto [known, first] = regions.try_emplace(location.memory_range, fetch.regions_size());
      if (first) {
        const auto target = engine_.remote(state_[location.memory_range]);
        auto& region = *fetch.add_regions();
        region.set_key(target.key);
        region.set_length(target.length);
      }
      fetch.add_region_indexes(known->second);
      fetch.add_offsets(location.offset);
    }
  };
  for (auto slice : slices) {
    // First marked, then the clock is read: the library first moves the clock, then looks at the marks. So either it
    // keeps the gradients of the update under way, or we ask for a version that contains it.
    while (!view_.set_slice(slice, view_.slice(slice), local::SliceStatus::requested(source.value))) {
    }
    fetch.add_slices(slice);
    add_target(slice);
  }
  const local::Clock clock = view_.clock();
  foreign_ = foreign_ && clock.version == at_first_.version;
  fetch.set_at_least(reached(clock) + (clock.updating ? 1 : 0));
  events::record(events::Kind::slices_asked, {.replica = source.value,
                                              .number = static_cast<std::uint32_t>(slices.size()),
                                              .a = slices.front(),
                                              .b = fetch.at_least()});
  return send(endpoint, message);
}

}  // namespace rejoin::catchup
