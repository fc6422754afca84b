// Takes a job's decisions out of a log's files, and into a store that several coordinators share: what an operator does
// to begin with several coordinators, or where the store's data is lost.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/ids.h"
#include "base/result.h"
#include "membership/store.h"

namespace asio {
class io_context;
}

namespace rejoin::daemon {

// What was written.
struct Transferred {
  std::uint64_t records = 0;  // of the file; or that what is in the store stands for
  std::uint64_t job = 0;
  Step committed;
  std::uint64_t begins_after = 0;  // the step; 0: with the job's first record
  std::uint64_t torn = 0;          // bytes behind the last record, which nobody was told of
  std::uint64_t term = 0;          // of the lead in the store: nobody's
};

// One file with all that is in this log and in the archives beside it. Errors: `out` exists, the log is damaged.
Result<Transferred> export_log(const std::string& log, const std::string& out);

// As a snapshot, and with a lead that nobody has and whose term is higher than any before it, so that a coordinator
// that still led finds that it does not. Runs `io` until it is done. Errors: the store has something of this job (and
// `replace` is not given, or what it has goes further than the log), or of another one; a leader shows there within
// `watch`, and twice the time that it may take for that, that it lives; the store does not answer. `where` and the
// `prefix` of its keys are for errors.
Result<Transferred> import_log(asio::io_context& io, membership::Store& store, const std::string& log, bool replace,
                               const std::string& where, const std::string& prefix, Duration watch);

}  // namespace rejoin::daemon
