// Callers of a listener that have not proven yet who they are: few, and not for long. Time comes in as a parameter.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>

#include "base/clock.h"
#include "transport/transport.h"

namespace rejoin::transport {

class Strangers {
 public:
  Strangers(std::size_t most, Duration patience) : most_(most), patience_(patience) {}

  void set_patience(Duration patience) { patience_ = patience; }
  void add(EndpointId id, TimePoint now) { since_.push_back({id, now}); }
  void remove(EndpointId id) {
    std::erase_if(since_, [&](const Since& each) { return each.id == id; });
  }
  bool empty() const { return since_.empty(); }
  // Who has to go now, to be called until there is nobody: who has had its time, and the oldest where there are too
  // many. An honest one needs two round trips, and only a flood that is faster than these displaces it; it comes again.
  std::optional<EndpointId> to_go(TimePoint now) const {
    if (since_.empty() || (since_.size() <= most_ && now - since_.front().at <= patience_)) return {};
    return since_.front().id;
  }

 private:
  struct Since {
    EndpointId id;
    TimePoint at;
  };
  std::size_t most_;
  Duration patience_;
  std::deque<Since> since_;  // oldest first
};

}  // namespace rejoin::transport
