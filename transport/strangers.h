// Callers of a listener that have not proven yet who they are: few, and not for long. What all backends do with them is
// here; what a stranger costs meanwhile is each backend's own. Each rail has a listener of its own, and a trainer has
// descriptors for a thousand files, its own ones among them: so they are counted for the whole process. Time comes in
// as a parameter.
#pragma once

#include <optional>
#include <string>

#include "base/clock.h"
#include "base/refusals.h"
#include "transport/greetings.h"
#include "transport/transport.h"

namespace rejoin::transport {

class Strangers {
 public:
  static constexpr std::size_t kMost = 256;  // at a time, of all listeners of this process
  static constexpr std::size_t kFew = 8;     // … of each of them in any case
  static constexpr const char* kTooLate = "it has not greeted in time, or too many do so at once";

  Strangers() = default;
  ~Strangers();
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;
  void set_silence(Duration silence) { greetings_.set_silence(silence); }
  // `descriptor`: of its connection, or -1.
  void add(EndpointId id, TimePoint now, int descriptor = -1);
  void remove(EndpointId id);
  bool empty() const { return greetings_.empty(); }
  // Who has to go now, to be called once what has come of them was read, until there is nobody: who has had its time,
  // and the oldest where there are too many. An honest one needs two round trips, and only a flood that is faster than
  // these displaces it; it comes again.
  std::optional<EndpointId> to_go(TimePoint now) { return crowd() ? greetings_.oldest() : greetings_.overdue(now); }
  // The last quarter of this process's descriptors is for others: one at a time is accepted, and those who are here go
  // for it.
  bool scarce() const { return scarce_; }
  // Removes one that does not come in. They may come for ever: 1, 2, 4, 8 … of them are logged. Who has gone by itself
  // (`unavailable`) was not refused. `from`: its address, where that is known.
  void refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why);
  // The same for one that was never added.
  void turn_away(refusals::Why why, const std::string& from, const std::string& what);

 private:
  bool crowd() const;

  Greetings greetings_;
  bool scarce_ = false;  // the last one's descriptor was of the last quarter
  std::uint64_t refused_ = 0;
};

}  // namespace rejoin::transport
