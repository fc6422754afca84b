// Callers of a listener that have not proven yet who they are: few, and not for long. What all backends do with them is
// here; what a stranger costs meanwhile is each backend's own. Time comes in as a parameter.
#pragma once

#include <optional>
#include <string>

#include "base/clock.h"
#include "transport/greetings.h"
#include "transport/transport.h"

namespace rejoin::transport {

class Strangers {
 public:
  static constexpr std::size_t kMost = 256;  // at a time
  static constexpr const char* kTooLate = "it has not greeted in time, or too many do so at once";

  void set_silence(Duration silence) { greetings_.set_silence(silence); }
  void add(EndpointId id, TimePoint now) { greetings_.add(id, now); }
  void remove(EndpointId id) { greetings_.remove(id); }
  bool empty() const { return greetings_.empty(); }
  // Who has to go now, to be called once what has come of them was read, until there is nobody: who has had its time,
  // and the oldest where there are too many. An honest one needs two round trips, and only a flood that is faster than
  // these displaces it; it comes again.
  std::optional<EndpointId> to_go(TimePoint now) {
    return greetings_.size() > kMost ? greetings_.oldest() : greetings_.overdue(now);
  }
  // Removes one that does not come in. They may come for ever: 1, 2, 4, 8 … of them are logged. Who has gone by itself
  // (`unavailable`) was not refused. `from`: its address, where that is known.
  void refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why);

 private:
  Greetings greetings_;
  std::uint64_t refused_ = 0;
};

}  // namespace rejoin::transport
