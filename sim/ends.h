// The invariant ends-are-heard: nobody is waited for whose process its daemon has seen end.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace rejoin::sim {

class Ends {
 public:
  using Place = std::pair<std::uint32_t, std::uint32_t>;  // replica and rank
  // `daemon`: the instance of the one that had it.
  void on_end(Place place, std::uint64_t daemon, TimePoint now) {
    ended_[place] = {.daemon = daemon, .told_since = now};
  }
  void on_start(Place place) { ended_.erase(place); }  // another process is there, and says itself who had its place

  // `decides`: the instance of who does; 0: nobody. `tells`: whether that one hears this daemon now. It has `patience`
  // for it. Returns what is wrong, for people.
  std::optional<std::string> check(TimePoint now, Duration patience, std::uint64_t decides,
                                   const std::vector<ReplicaId>& waited_for,
                                   const std::function<bool(std::uint64_t)>& tells) {
    const bool anew = std::exchange(decides_, decides) != decides;
    for (auto& [place, end] : ended_) {
      const bool waits = std::find(waited_for.begin(), waited_for.end(), ReplicaId(place.first)) != waited_for.end();
      if (anew || !waits || !tells(end.daemon)) end.told_since = now;
      else if (now - end.told_since > patience)
        return fmt::format("replica {} is waited for, and its rank {} has ended before its daemon's eyes", place.first,
                           place.second);
    }
    return std::nullopt;
  }

 private:
  struct End {
    std::uint64_t daemon = 0;
    TimePoint told_since{};
  };
  std::map<Place, End> ended_;
  std::uint64_t decides_ = 0;
};

}  // namespace rejoin::sim
