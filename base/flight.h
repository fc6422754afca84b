// The flight recorder of this process: its last events (events.h) in a file that it has mapped, so that they are there
// however it ends, by SIGKILL too. No signal is handled for it. See "Flight recorder" in docs/design-notes.md.
//
// Recordings of one user's processes are beside each other in a directory: WHO.PID.NUMBER.flight, of which only the
// user may read any. What is left of processes that have ended is bounded: whoever opens a recording removes those that
// are older than a week, and of the others the oldest as long as there are more than 48 of them, or 160 MiB, or a
// quarter of the file system. Of those that never heard of a job, as of trainers that are refused again and again, the
// newest 8 stay: they are not to push out the one that says why. A recording is locked (flock) while its process lives,
// and never removed then.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/event_kinds.h"
#include "base/result.h"

namespace rejoin::flight {

constexpr const char* kSuffix = ".flight";
constexpr std::size_t kMostLeft = 48, kMostJoblessLeft = 8;
constexpr std::uint64_t kMostBytesLeft = 160 * MiB, kShareLeft = 4;  // … and of the file system one part of so many

// Where recordings are if nobody says where: /dev/shm/rejoin-UID, or in /tmp where there is no /dev/shm. UID is a
// number.
std::string default_directory();
// For who reads there. Error: it is there, and is another's, or others may write to it.
Result<> check_default_directory();

// Begins the recording of this process, or, where it has one, notes in it that the process is also `who`. An empty
// directory: the default; "off": no recording. What makes it impossible (no room, no rights) is said once, in the log,
// and harms nothing. Any thread. `program`: for people.
void open(const std::string& directory, const std::string& who, const std::string& program);
// The same, with the reason why there is none.
Result<> try_open(const std::string& directory, const std::string& who, const std::string& program);
bool is_open();  // for tests
// A sign of life, with the time of the day.
void beat();
// The job that this process is of.
void set_job(std::uint64_t job);
// One event of this process. Any thread; not in a child of fork(), which has no recording.
void record(events::Kind kind, const events::Numbers& numbers, std::string_view text);

// `who` as names of recordings and event files have it: what is no letter, digit, '-', '_' or '.' is a '_', as is a '.'
// at its beginning, and a name that a file system would not take is cut.
std::string in_file_name(std::string who);

// Whose CLOCK_MONOTONIC this process has: a number that follows from the system's boot and the time namespace.
std::uint64_t clock_id();

}  // namespace rejoin::flight
