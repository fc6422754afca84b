// Callers of a listener that have not proven yet who they are: few, and not for long. What all backends do with them is
// here; what a stranger costs meanwhile is each backend's own. Time comes in as a parameter.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/deadlines.h"
#include "transport/transport.h"

namespace rejoin::transport {

class Strangers {
 public:
  static constexpr std::size_t kMost = 256;  // at a time
  static constexpr const char* kTooLate = "it has not greeted in time, or too many do so at once";

  void set_silence(Duration silence) { patience_ = deadlines::kDataProof.of(silence); }
  void add(EndpointId id, TimePoint now) { since_.push_back({id, now}); }
  void remove(EndpointId id) {
    std::erase_if(since_, [&](const Since& each) { return each.id == id; });
  }
  bool empty() const { return since_.empty(); }
  // Who has to go now, to be called until there is nobody: who has had its time, and the oldest where there are too
  // many. An honest one needs two round trips, and only a flood that is faster than these displaces it; it comes again.
  std::optional<EndpointId> to_go(TimePoint now) const {
    if (since_.empty() || (since_.size() <= kMost && now - since_.front().at <= patience_)) return {};
    return since_.front().id;
  }
  // Removes one that does not come in. They may come for ever: 1, 2, 4, 8 … of them are logged. Who has gone by itself
  // (`unavailable`) was not refused. `from`: its address, where that is known.
  void refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why);

 private:
  struct Since {
    EndpointId id;
    TimePoint at;
  };
  Duration patience_ = deadlines::kDataProof.of(deadlines::kSilence);
  std::deque<Since> since_;  // oldest first
  std::uint64_t refused_ = 0;
};

}  // namespace rejoin::transport
