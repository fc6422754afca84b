// Which slice is fetched from which source. Pure: the joiner tells it what happened and asks what to do next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace rejoin::catchup {

class Planner {
 public:
  // `slices` to be fetched; at most `window` of them under way from one source, fewer after narrow().
  Planner(std::uint32_t slices, std::uint32_t window);

  // It is there already, from an earlier catch-up.
  void on_present(std::uint32_t slice);
  void on_source_up(ReplicaId source);
  // What it owed is to be fetched from others. The caller has fenced the source before it asks again.
  void on_source_down(ReplicaId source);
  // The next slices to ask this source for; they count as under way from now on. It has no more of them than its share
  // of what is left, among those that are up and those that are expected to be at once: so many `sources`. Without that
  // whoever is up first would have all of a small state.
  std::vector<std::uint32_t> next(ReplicaId source, std::size_t sources = 0);
  // A slice came whole; false where it was not expected from this source (stale: to be ignored).
  bool on_arrived(ReplicaId source, std::uint32_t slice);
  // It must be fetched again: damaged, abandoned or disproved.
  void on_again(std::uint32_t slice);

  bool all_arrived() const { return arrived_ == total_; }
  bool has(std::uint32_t slice) const { return have_[slice]; }
  std::uint32_t arrived() const { return arrived_; }
  std::uint32_t refetched() const { return refetched_; }
  std::size_t sources() const { return sources_.size(); }
  // Half as many slices at a time, as gradients kept for those under way ran over their budget; each time a window has
  // arrived since, one more.
  void narrow();
  std::uint32_t window() const { return window_; }

 private:
  struct Source {
    std::set<std::uint32_t> under_way;
  };
  const std::uint32_t total_, widest_;
  std::uint32_t window_, arrived_since_ = 0;
  std::deque<std::uint32_t> waiting_;
  std::map<ReplicaId, Source> sources_;
  std::vector<bool> have_;
  std::uint32_t arrived_ = 0, refetched_ = 0;
};

}  // namespace rejoin::catchup
