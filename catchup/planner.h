// The planner decides which slice is fetched from which source. It is pure: the joiner tells it what has happened and
// asks what to do next.
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
  // There are `slices` to fetch. At most `window` of them are under way from one source, fewer after narrow().
  Planner(std::uint32_t slices, std::uint32_t window);

  // The slice is there already, from an earlier catch-up. Before next() is called for the first time.
  void on_present(std::uint32_t slice);
  void on_source_up(ReplicaId source);
  // The source is gone: next() gives out to others what was outstanding from it. The caller fences the source before it
  // calls next() again.
  void on_source_down(ReplicaId source);
  // Returns the slices to ask this source for next. They count as under way from now on. It has no more of them than
  // its share of what is left, among those that are up and those that are expected to be at once: so many `sources`.
  // Without that whoever is up first would have all of a small state.
  std::vector<std::uint32_t> next(ReplicaId source, std::size_t sources = 0);
  // A slice has arrived completely. Returns false where it was not expected from this source: the caller ignores it
  // then.
  bool on_arrived(ReplicaId source, std::uint32_t slice);
  // The slice must be fetched again, because it was damaged or abandoned, or its digest differs.
  void on_again(std::uint32_t slice);

  bool all_arrived() const { return arrived_ == total_; }
  bool has(std::uint32_t slice) const { return have_[slice]; }
  std::uint32_t arrived() const { return arrived_; }
  // How often a slice that had arrived was fetched again. One that a lost source still owed is not counted.
  std::uint32_t refetched() const { return refetched_; }
  std::size_t sources() const { return sources_.size(); }
  // Halves the window, because the gradient log of the slices under way ran over its budget. Each time a window of
  // slices has arrived since then, the window grows by one.
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
