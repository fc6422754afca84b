// Connections whose greeting is under way, and the time that each has had for it. Time comes in as a parameter.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/deadlines.h"
#include "transport/transport.h"

namespace rejoin::transport {

// Who looks at its connections seldom, or stood still itself, may find an answer that came in time. So of the time
// between two looks at most a fifth of the patience counts: nobody is late before it has been looked for several times.
class Greetings {
 public:
  void set_silence(Duration silence) { patience_ = deadlines::kDataProof.of(silence); }
  std::string too_late(std::string_view what = "it does not answer") const {
    return fmt::format("{} in {:.1f} s", what, seconds(patience_));
  }
  void add(EndpointId id, TimePoint now) {
    look(now);
    since_.push_back({id, attended_});
  }
  // Returns how many these were: 0 or 1.
  std::size_t remove(EndpointId id) {
    return std::erase_if(since_, [&](const Since& each) { return each.id == id; });
  }
  bool empty() const { return since_.empty(); }
  std::size_t size() const { return since_.size(); }
  EndpointId oldest() const { return since_.front().id; }  // of one at least
  // One that has had its time, to be called once what has come of it was read, until there is none.
  std::optional<EndpointId> overdue(TimePoint now) {
    look(now);
    if (since_.empty() || attended_ - since_.front().at <= patience_) return {};
    return since_.front().id;
  }

 private:
  struct Since {
    EndpointId id;
    Duration at;
  };
  void look(TimePoint now) {
    attended_ += std::min(now - looked_, patience_ / 5);
    looked_ = now;
  }

  Duration patience_ = deadlines::kDataProof.of(deadlines::kSilence);
  Duration attended_{};  // the time that counts, since this was made
  TimePoint looked_{};
  std::deque<Since> since_;  // oldest first
};

}  // namespace rejoin::transport
