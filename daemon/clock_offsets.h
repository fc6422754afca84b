// How clocks of different machines stand to each other, out of messages that say when they were sent: NTP's way, with
// the quickest message of either direction. A message that is sent at s by one clock and heard at h by another says
// that the other is ahead by at most h - s; those of the other direction say by how much at least. In between is the
// offset, and half of that interval is how far the middle of it may be wrong, however unequal the two ways are. No two
// clocks run alike: the offset is estimated anew for each ten seconds, and how it changes, over all of the time. How
// far that may be wrong is added to the error. A clock that stands while its machine is suspended jumps against the
// others: what is before that and what is behind it are estimated each by itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace rejoin::daemon {

struct StampedMessage {
  std::uint64_t from = 0, to = 0;          // clocks
  std::int64_t sent_ns = 0, heard_ns = 0;  // by either
};

class ClockOffsets {
 public:
  ClockOffsets(const std::vector<StampedMessage>& messages, std::uint64_t reference);
  struct Time {
    std::int64_t at = 0, error = 0;  // by the reference's clock; it is wrong by no more than that
  };
  // Nothing: no messages in both directions connect this clock with the reference's.
  std::optional<Time> on_reference(std::uint64_t clock, std::int64_t at) const;
  // For how long the clock of another has stood, all in all.
  std::int64_t stood(std::uint64_t clock) const;

 private:
  struct Bound {
    std::int64_t at = 0, offset = 0;  // by the clock
    bool most = false;                // otherwise at least
  };
  struct Estimate {
    std::int64_t at = 0;                 // by the clock
    std::int64_t offset = 0, error = 0;  // + a time by the clock: by the other one
  };
  struct Era {                          // in which neither of two clocks stood
    std::int64_t begins = 0, ends = 0;  // its first and last message, by the clock
    std::vector<Bound> bounds;          // in the order of time
    std::vector<Estimate> estimates{};  // one at least
  };
  struct Way {
    std::uint64_t towards = 0;
    std::vector<Era> eras{};             // one at least
    double rate = 0, rate_error = 1e-4;  // of the offset
    Time at_other(std::size_t era, std::int64_t at) const;
    Time at_other(std::int64_t at) const;
    std::int64_t between(std::size_t era) const;
  };
  static std::vector<Era> eras_of(const std::vector<StampedMessage>& messages, std::uint64_t clock);
  static std::vector<Estimate> windows(const std::vector<Bound>& bounds, double rate);
  static std::optional<Way> estimate(const std::vector<StampedMessage>& messages, std::uint64_t clock,
                                     std::uint64_t other);
  const std::uint64_t reference_;
  std::map<std::uint64_t, Way> ways_;  // of each clock the first step towards the reference
};

}  // namespace rejoin::daemon
