// What happened and when. record() is for what every process of a job does, and cheap enough for every bucket of every
// step: it goes to the process' flight recorder (flight.h), if that is open. An event file, where one is open, has
// JSON lines, for the demo's timeline, `rejoin trace` and people: those of record() that are rare enough, and what
// emit() is given. Times are CLOCK_MONOTONIC nanoseconds, so that the files of one node's processes line up.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/event_kinds.h"
#include "base/result.h"

namespace rejoin::events {

using Value = std::variant<std::int64_t, std::uint64_t, double, bool, std::string>;
using Fields = std::vector<std::pair<std::string_view, Value>>;

// Opens DIRECTORY/WHO.PID.jsonl; without it (or with an empty directory) events go nowhere. Again: events go there from
// now on. Any thread.
Result<> open(const std::string& directory, const std::string& who);

// One line, written at once (so that a killed process leaves every event that it emitted). Any thread.
void emit(std::string_view kind, const Fields& fields = {});

// Any thread; without an event file it neither locks nor allocates.
void record(Kind kind, const Numbers& numbers = {}, std::string_view text = {});

}  // namespace rejoin::events
