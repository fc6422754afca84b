// How the sentences of `rejoin explain` call times, processes and what they said.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "daemon/incidents.h"

namespace rejoin::daemon {

constexpr std::int64_t kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;
constexpr std::int64_t kMostToDecide = 60 * kSecond;  // from the end of a process to the epoch without it

// A number that a recording has for a time: what can be none is cut.
constexpr std::int64_t nanoseconds(std::uint64_t number) {
  return static_cast<std::int64_t>(std::min(number, std::uint64_t{1} << 60));
}
std::string time_of_day(std::int64_t wall);    // UTC, of ns since 1970: 14:01:22.125
std::string lasting(std::int64_t ns);          // "1.5 ms"
std::string role_of(const Recording& one);     // "trainer r1.0"
std::string process_of(const Recording& one);  // "trainer r1.0 (process 4711 on node7)"
std::string capital(std::string text);
std::string short_text(const std::string& text);  // within a sentence

// The last event up to then, and the first of a kind; none: null.
const RecordedEvent* last_before(const Recording& one, std::int64_t at);
const RecordedEvent* find_event(const Recording& one, events::Kind kind, std::int64_t from,
                                std::int64_t to = std::numeric_limits<std::int64_t>::max());

}  // namespace rejoin::daemon
