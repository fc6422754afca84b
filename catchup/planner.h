// The planner decides which slice is fetched from which source. It is pure: the joiner tells it what has happened and
// asks what to do next.
//
// Sources are contributors, which have everything, and fellow joiners, which offer what they have proven. Each of the
// joiners first asks contributors for its own turn of the slices, those whose number has its own remainder, and among
// these for what no fellow offers; it has the rest from its fellows. So contributors send each slice about once,
// however many joiners there are. Who is through with its own turn, and has few slices under way from anybody, asks
// contributors for others' slices, one at a time and no more than one turn of them: so a slow fellow holds nobody up,
// and contributors send each slice about twice at most. Past that bound it asks only where nothing has come from
// anybody for a while: for one slice, and for twice as many each time until a fellow sends something. So joiners that
// can have nothing of each other are soon as fast as one alone.
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

// Whom the joiner with this number asks of so many that pass on what they have: all of a few, of more those that are 1,
// 2, 4 … behind it, so that what one has is everywhere after few hops.
std::vector<std::uint32_t> fellows_of(std::uint32_t own, std::uint32_t of);

class Planner {
 public:
  // There are `slices` to fetch. At most `window` of them are under way from one source, fewer at first, when others
  // may be about to come whose turn they would be, and after narrow().
  Planner(std::uint32_t slices, std::uint32_t window);

  // The slice is there already, from an earlier catch-up. Before next() is called for the first time.
  void on_present(std::uint32_t slice);
  // The time, for what follows.
  void on_time(TimePoint now);
  // This joiner is number `own` of so many that serve each other.
  void set_turn(std::uint32_t own, std::uint32_t of);
  // A contributor; `distance`: how far away it is, see reach_to().
  void on_source_up(ReplicaId source, std::size_t distance = 0);
  void on_fellow_up(ReplicaId fellow);                     // a joiner, which offers nothing yet
  void on_offered(ReplicaId fellow, std::uint32_t slice);  // it has this one
  // The source is gone: next() gives out to others what was outstanding from it. The caller fences the source before it
  // calls next() again.
  void on_source_down(ReplicaId source);
  // Returns the slices to ask this source for next. They count as under way from now on. It has no more of them than
  // its share of what is left, among those that are up and those that are expected to be at once: so many `sources`.
  // Without that whoever is up first would have all of a small state. Shares are as what each has delivered lately, so
  // that who is slow does not owe much when the others have nothing left to do. `idle`: nothing has come for a while.
  std::vector<std::uint32_t> next(ReplicaId source, std::size_t sources = 0, bool idle = false);
  // Sources that are farther away than this are asked for nothing from now on; what is under way from them comes.
  void reach_to(std::size_t distance) { reach_ = distance; }
  // A slice has arrived completely. Returns false where it was not expected from this source: the caller ignores it
  // then.
  bool on_arrived(ReplicaId source, std::uint32_t slice);
  // The slice must be fetched again, because it was damaged or abandoned, or its digest differs.
  void on_again(std::uint32_t slice);
  // What has arrived from the source was as it had sent it, or damaged: on_again() has been told. Others are asked for
  // the slice then, where there are any; and who sends nothing else any more is asked for nothing while others can be.
  // on_spoilt() returns true where that begins.
  void on_sound(ReplicaId source, std::uint32_t slice);
  bool on_spoilt(ReplicaId source, std::uint32_t slice);

  bool all_arrived() const { return arrived_ == total_; }
  bool has(std::uint32_t slice) const { return have_[slice]; }
  std::uint32_t arrived() const { return arrived_; }
  std::size_t under_way(ReplicaId source) const;
  // How often a slice that had arrived was fetched again. One that a lost source had not sent yet is not counted.
  std::uint32_t refetched() const { return refetched_; }
  // Halves the window, because the gradient log of the slices under way ran over its budget. Each time a window of
  // slices has arrived since then, the window grows by one.
  void narrow();
  std::uint32_t window() const { return window_; }  // for tests

 private:
  using Priority = std::int64_t;  // slices are asked for in ascending order
  using Queue = std::map<Priority, std::uint32_t>;
  struct Source {
    bool fellow = false;
    std::set<std::uint32_t> under_way;
    std::vector<bool> offers;  // of a fellow, by slice
    Queue offered;             // … those that wait
    std::size_t distance = 0;
    std::uint32_t arrived = 0;    // slices
    std::uint32_t delivered = 0;  // … lately
    std::uint32_t spoilt = 0;     // those of the last ones, without a sound one
    std::uint64_t weight() const { return std::uint64_t{delivered} + 1; }
  };
  Queue& queue_of(std::uint32_t slice);
  void wait(std::uint32_t slice, Priority priority);
  std::uint32_t usually_delivered() const;
  void count(Source& source);
  void take(std::uint32_t slice);
  bool others_can(ReplicaId than) const;
  bool waits(std::uint32_t slice) const { return priorities_[slice] != kNotWaiting; }
  bool is_own(std::uint32_t slice) const { return slice % of_ == own_; }
  std::uint32_t turn() const { return (total_ + of_ - 1) / of_; }

  static constexpr Priority kNotWaiting = std::int64_t{1} << 62;
  const std::uint32_t total_, widest_;
  std::uint32_t window_, arrived_since_ = 0;
  std::size_t counted_ = 0;  // slices that were delivered since the last time that all counts were halved
  std::size_t reach_ = ~std::size_t{0};
  std::uint32_t own_ = 0, of_ = 1;
  std::set<std::uint32_t> out_of_turn_;         // slices of others' turns that contributors were asked for
  std::uint32_t granted_ = 0, last_grant_ = 0;  // slices past the bound: that may yet be asked for, and at once
  std::optional<TimePoint> granted_at_;
  TimePoint now_{};
  std::optional<TimePoint> begun_;
  std::uint32_t plain_ = 0;       // slices that have arrived and are not of these
  std::deque<TimePoint> recent_;  // … the last of them
  bool slow_ = false;
  Priority first_ = -1, last_;  // that are free
  std::vector<Priority> priorities_;
  // Slices that wait: nobody offers them, and they are of this joiner's turn or another's; a fellow offers them.
  Queue own_turn_, others_turns_, offered_;
  std::map<ReplicaId, Source> sources_;
  std::vector<std::uint16_t> offers_;  // by slice: how many fellows have it
  std::vector<bool> have_;
  std::map<std::uint32_t, ReplicaId> spoilt_;  // slices that came damaged, and from whom last
  std::uint32_t arrived_ = 0, refetched_ = 0;
};

}  // namespace rejoin::catchup
