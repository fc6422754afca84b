// What a coordinator's log says of every sample. A reading of its own: of how samples are handed out it knows only that
// those which come back go out before new ones do.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "base/ids.h"
#include "control.pb.h"
#include "membership/ledger.h"
#include "membership/log.h"
#include "membership/rank_set.h"

namespace rejoin::daemon {

struct LogAudit {
  std::uint64_t epochs = 0, committed = 0;  // the job's, at the log's end
  std::uint64_t samples = 0;                // up to the highest one that a commit names, rolled back or not
  std::uint64_t once = 0, repeated = 0;     // trained once, more than once
  std::uint64_t lost = 0;                   // not trained, and never handed out again
  // Not trained, and at most as many as may have been with those who were lost in the job's last steps: it was finished
  // before these could be handed out again. The log doesn't say which samples they had, so that a loss of another kind
  // can be among these, up to a batch for each who was lost then.
  std::uint64_t left_over = 0;
  // Not trained either: they were handed out and not committed, or rolled back. They go out before new ones do.
  std::uint64_t to_be_trained = 0;
  // The job has gone on from the checkpoint of this step (0: from none), by which so many of `once` are trained.
  std::uint64_t checkpoint = 0, before_checkpoint = 0;
  // The log was compacted after this step (0: it was not, or its archives are there), and so many of `once` are trained
  // by what it says of the steps before.
  std::uint64_t compacted = 0, before_compacted = 0;
};

// Follows the log, and finds where samples were passed over.
//
// Between two commits of one epoch nobody comes or goes: all that goes out after the first is trained in the second.
// Has that one trained a sample that was never out before, then nothing was left that waited to go out again; so what
// lies before it and is not trained will never be.
//
// Which samples were out before is not written where the replica that held them was lost. But nobody has held more than
// a batch in each epoch and step: that bounds them. It bounds, too, what may be left over when the job is finished:
// what had waited to go out before the last step, and a batch of each who had one in it and is not in its commit.
class PassedOver {
 public:
  // `kept`: of so many of the last steps it knows what to take back when they are rolled back.
  explicit PassedOver(std::uint64_t kept) : kept_(kept) {}
  void take(const proto::LogRecord& record);
  std::uint64_t not_trained() const;
  std::uint64_t samples() const { return highest_; }
  std::uint64_t lost() const { return passed_over_.size(); }
  std::uint64_t may_be_left_over() const { return may_be_left_over_; }

 private:
  void commit(const proto::LogRecord::Committed& committed);
  void begin_from(const proto::LogRecord::Snapshot& snapshot);
  void roll_back(const proto::LogRecord::RolledBack& record);

  void take(const proto::LogRecord::Job& job);
  std::uint64_t dealt_to(std::uint64_t contributors) const;

  std::uint64_t kept_;
  std::uint64_t batch_ = 0;       // of a replica, at most
  std::uint64_t at_most_ = 1000;  // … in thousandths of that: where replicas share by speed
  std::uint64_t together_ = 0;    // of all replicas, where that is constant
  std::uint64_t unit_ = 0;        // … which each gets at least
  std::map<std::uint64_t, membership::Samples> steps_;
  membership::Samples trained_, passed_over_;
  std::uint64_t highest_ = 0;
  std::uint64_t out_before_ = 0;  // at the last commit: no sample from here on had ever been handed out
  std::uint64_t may_be_out_ = 0;  // since then, at most so many new ones
  bool quiet_ = false;            // nobody has come or gone since the last commit
  std::set<std::uint32_t> hold_;  // replicas that have had a batch since then
  std::uint64_t may_be_left_over_ = 0;
};

// Takes a log's records in their order.
class LogAuditor {
 public:
  // `kept`: of so many of the last steps, as a ledger does, it knows the samples of each. So it is small however long
  // the log is.
  explicit LogAuditor(std::uint64_t kept = membership::Ledger::kStepsKept) : passed_over_(kept), trained_(kept) {}
  void take(const proto::LogRecord& record);
  // `last_step`: where it is known, the step after which the job is finished. The log doesn't name it; without it a
  // sample is lost only where new ones went out before it.
  LogAudit result(std::optional<Step> last_step) const;
  const membership::RolledBack& rolled_back() const { return trained_.rolled_back(); }

 private:
  LogAudit audit_;
  PassedOver passed_over_;
  membership::TrainedSteps trained_;
};

}  // namespace rejoin::daemon
