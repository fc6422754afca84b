// Flight recordings of processes that never were.
#pragma once

#include <algorithm>

#include "daemon/recording.h"

namespace rejoin::daemon {

constexpr std::int64_t ms = 1'000'000;  // in ns, as recordings have times

struct MadeUp {
  Recording made;
  std::uint64_t job = 7;
  std::int64_t skew = 0;  // its clock is ahead by so much

  MadeUp(const std::string& who, std::uint64_t clock, std::uint32_t pid = 100) {
    made.file = who + ".flight";
    made.who = who;
    made.host = "host";
    made.pid = pid;
    made.clock = clock;
    made.opened_ns = 1;
    made.opened_wall_ns = 1'790'000'000'000'000'000;
  }
  void add(std::int64_t at, events::Kind kind, const events::Numbers& numbers = {}, const std::string& text = "") {
    made.events.push_back({.at = at, .kind = kind, .numbers = numbers, .text = text});
  }
  // By the true time; set the skew before.
  void hear(const MadeUp& from, std::int64_t sent, std::int64_t heard) {
    add(heard, events::Kind::heard, {.a = from.made.clock, .b = static_cast<std::uint64_t>(sent + from.skew)});
  }
  Recording recording() const {
    Recording one = made;
    one.job = job;
    for (auto& event : one.events) event.at += skew;
    std::ranges::stable_sort(one.events, {}, &RecordedEvent::at);
    return one;
  }
};

}  // namespace rejoin::daemon
