// The invariant ends-are-heard: nobody is waited for whose process its daemon has seen end.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/ids.h"

namespace rejoin::sim {

class Ends {
 public:
  using Place = std::pair<std::uint32_t, std::uint32_t>;  // replica and rank
  using Tells = std::function<bool(std::uint64_t)>;       // whether who decides hears this daemon now
  // `daemon`: the instance of the one that had it. `heard`: the process had heard of decisions.
  void on_end(Place place, std::uint64_t daemon, bool heard, TimePoint now) {
    ended_[place] = {.daemon = daemon, .heard = heard, .told_since = now};
  }
  void on_start(Place place) { ended_.erase(place); }  // another process is there, and says itself who had its place

  // Whether the daemon that is to tell of this end knows that the process had heard of decisions.
  bool has_heard(Place place) const {
    const auto found = ended_.find(place);
    return found != ended_.end() && found->second.heard;
  }

  // `decides`: the instance of who does; 0: nobody. `waited_for`: how long a replica may be that has ended. Returns
  // what is wrong, for people.
  std::optional<std::string> check(TimePoint now, std::uint64_t decides,
                                   const std::map<ReplicaId, Duration>& waited_for, const Tells& tells) {
    const bool anew = std::exchange(decides_, decides) != decides;
    for (auto& [place, end] : ended_) {
      const auto patience = waited_for.find(ReplicaId(place.first));
      if (anew || patience == waited_for.end() || !tells(end.daemon)) end.told_since = now;
      else if (now - end.told_since > patience->second)
        return fmt::format("replica {} is waited for, and its rank {} has ended before its daemon's eyes", place.first,
                           place.second);
    }
    return std::nullopt;
  }

 private:
  struct End {
    std::uint64_t daemon = 0;
    bool heard = false;
    TimePoint told_since{};
  };
  std::map<Place, End> ended_;
  std::uint64_t decides_ = 0;
};

}  // namespace rejoin::sim
