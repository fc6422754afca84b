// What went wrong in a job, out of its joined flight recordings: each time that somebody was taken out, and each
// process that ended without a word. Pure; what the recordings do not tell is left open here, and `rejoin explain` says
// so (explain.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/recording.h"

namespace rejoin::daemon {

// An epoch, as its coordinator decided it, or as those who entered it know it.
struct EpochDecision {
  std::int64_t at = 0;
  std::uint64_t epoch = 0, step = 0;
  std::map<std::uint32_t, bool> members;  // replica: whether it is catching up
  std::string reason;                     // empty: no coordinator's recording has it
  bool decided = false;                   // … and so the time is when the first process entered it
};

struct Incident {
  std::int64_t at = 0;                  // of the decision, or of the end of the first process
  std::optional<std::size_t> decision;  // among Incidents::decisions
  std::vector<std::uint32_t> lost;      // replicas that this epoch is without, and the one before was not
  std::vector<const Recording*> ended;  // without a word, in the order of time
  std::string title() const;            // "epoch 4, without replica 1"
  std::uint64_t epoch = 0;
  // Without a decision: somebody's recording goes on past it who would have entered, or begun, an epoch.
  bool shows_no_epoch = true;
};

struct Incidents {
  std::vector<EpochDecision> decisions;  // ascending
  std::vector<Incident> all;             // in the order of time
  std::size_t unknown = 0;               // processes that have ended without a word, or lived when they were copied
};

// `recordings` outlive what is returned.
Incidents find_incidents(const Recordings& recordings);

// Whether the process has said that it ends. One that is still there has not.
bool said_that_it_ends(const Recording& recording);
// Whether a trainer was ever in the job, as far as its recording goes back.
bool took_part(const Recording& recording);
bool decides(const Recording& recording);  // a coordinator's
std::optional<std::pair<std::uint32_t, std::uint32_t>> place_of(
    const Recording& recording);  // a trainer's: replica, rank

}  // namespace rejoin::daemon
