// The time at which a heartbeat was sent, by its sender's clock: what offsets between the clocks of nodes are estimated
// from (clock_offsets.h); before that the time by its system's clock, which `rejoin doctor` compares. They stand behind
// the message, as three fields of protobuf that no message has: whoever does not look for them does not see them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rejoin::daemon {

struct ClockStamp {
  std::uint64_t clock = 0;  // whose: see flight::clock_id()
  std::int64_t sent_ns = 0;
};

void append(std::string& message, const ClockStamp& stamp, std::int64_t system_time);
std::optional<ClockStamp> stamp_of(std::string_view message);
std::optional<std::int64_t> system_time_of(std::string_view message);  // µs since 1970
std::int64_t system_time();

// Of this process, now: on a heartbeat that is about to be sent; and into its flight recording what has come with one.
void stamp(std::string& message);
void hear_stamp(std::string_view message);

}  // namespace rejoin::daemon
