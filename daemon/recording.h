// Flight recordings (base/flight_ring.h), as `rejoin trace` and `rejoin explain` read them: files of other machines,
// perhaps cut off or damaged, or still being written to. What is whole of them counts, and what is not is said.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/event_kinds.h"
#include "base/result.h"
#include "daemon/clock_offsets.h"

namespace rejoin::daemon {

struct RecordedEvent {
  std::int64_t at = 0;  // ns; by the clock of its process, or when recordings are joined by that of all
  events::Kind kind{};
  events::Numbers numbers;
  std::string text;
  bool cut = false;  // the end of its first text is missing
  std::string first_text() const { return text.substr(0, text.find('\n')); }
  std::string more_text() const {
    const auto end = text.find('\n');
    return end == std::string::npos ? "" : text.substr(end + 1);
  }
};

// Of one process.
struct Recording {
  std::string file, who, host;
  std::uint32_t pid = 0;
  std::uint64_t clock = 0, job = 0;
  std::int64_t opened_ns = 0, opened_wall_ns = 0;
  std::vector<RecordedEvent> events;         // in the order of time
  std::uint64_t damaged = 0;                 // slots that are not whole
  std::uint64_t missing = 0;                 // slots behind the file's end
  std::int64_t begins[events::kRings] = {};  // what was before that was overwritten; 0: nothing was
  bool lives = false;                        // its process does, for certain
  std::string name() const;                  // "r0.1, process 4711 on node7"
};

// When the last one was; of a recording without any, when it begins.
std::int64_t last_event(const Recording& recording);

// Errors: `corrupt` where it is no recording. Never more events than the bytes can hold.
Result<Recording> parse_recording(BytesView bytes, const std::string& file);

// All of one job, on one clock.
struct Recordings {
  std::vector<Recording> all;
  std::uint64_t job = 0;
  std::int64_t wall_offset = 0;  // + a time of one of the last events: ns since 1970
  std::vector<std::pair<std::int64_t, std::int64_t>> wall_offsets{};  // the same at each of these times, ascending
  std::int64_t clock_error = 0;                                       // at most, between two processes; ns
  std::size_t clocks = 0;                                             // different ones, which were compared
  std::vector<std::string> notes;                                     // what is not whole or not known, a sentence each
  std::vector<std::string> files{};          // that were given, or are in directories that were
  std::vector<std::string> others;           // … of these that are no recordings, for whoever knows what they are
  std::int64_t wall(std::int64_t at) const;  // ns since 1970, of a time of an event
};

// Files, and all files in directories; the default directory where there are none. Of several jobs the one with the
// last event, or `job`. Errors: `not_found` where a path is not there, or no recording; `io` where the system
// does not say; `exhausted` where the events of all would take more bytes than `memory` (0: half of this machine's).
Result<Recordings> read_recordings(const std::vector<std::string>& paths, std::uint64_t job = 0,
                                   std::uint64_t memory = 0);
// Puts them on one clock, that of who decides.
Recordings join(std::vector<Recording> all, std::uint64_t job = 0);

}  // namespace rejoin::daemon
