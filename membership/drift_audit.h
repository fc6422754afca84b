// The drift audit compares replicas. For every step it compares what they reduced, and a part of their state that the
// step alone chooses, so that it compares all of the state once in `period` steps. It compares rank i with rank i of
// the others. It is pure; the coordinator asks it before each commit.
//
// A difference is never committed. At first the step is repeated in a new epoch from the same inputs, and the ranks
// concerned tell what is behind their digests (`Details`). Then:
//   results  that differed once are a bit that flipped on its way: counted, and the hop named over which it came. The
//            process whose hops the last three were is out, but its state is right: it is suspended, unless its state
//            differs, too.
//   states   differ again. Whom the majority of contributors disagrees with is out for good; where there is none,
//            nobody can tell who is right, and the job stops until an operator has decided.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "membership/audit_config.h"
#include "membership/digest_table.h"

namespace rejoin::membership {

class DriftAudit {
 public:
  DriftAudit(const AuditConfig& config, std::uint32_t ranks);

  struct Voter {
    ReplicaId replica;
    Incarnation incarnation;
    bool contributes = false;
  };
  struct Verdict {
    enum class Kind { agree, repeat, suspend, remove, stop } kind = Kind::agree;
    ReplicaId replica;  // to be suspended, where it has a state, or removed
    std::string reason;
    std::vector<ReplicaId> among{};  // stop: those that differ
  };

  void on_digest_time(std::uint32_t rank, Duration of_all_state);  // as one of a replica has measured it
  void on_reduced(ReplicaId replica, const proto::Reduced& reduced);
  void on_details(const proto::Details& details);
  // A joiner found that its sources differ: that part is audited next.
  void on_drift(const proto::Drift& drift);
  // All voters have reduced in this epoch, in which step `committed` + 1 is run.
  Verdict judge(std::span<const Voter> voters, Epoch epoch, Step committed);
  void on_epoch() {  // everybody reduces again
    reported_.clear();
    states_reported_alike_ = true;
  }
  // The coordinator has started again. Members may still digest the phase that the one before it named, so their
  // states' digests of this epoch are not compared.
  void on_recovered() { states_reported_alike_ = false; }
  void on_committed(TimePoint now);
  // Writes into the plan what ranks have to know of the audit.
  void fill(proto::Plan& plan) const;

  struct Counted {
    std::uint64_t result_differences = 0, state_differences = 0;  // steps that were repeated for them
    std::uint64_t drift_reports = 0;                              // of joiners
    std::uint64_t rounds = 0;                                     // all of the state, compared
    std::string last;                                             // difference, for people
  };
  const Counted& counted() const { return counted_; }
  std::uint64_t period() const { return period_; }
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  struct Inspection {
    Epoch epoch;
    Step committed;
    std::uint32_t rank = 0;
    bool of_state = false;
    std::map<std::uint32_t, std::uint64_t> digests;  // by replica
    std::map<std::uint32_t, proto::Details> details;
    int times = 1;                                     // in a row that the states of this version have differed
    std::map<std::uint32_t, Incarnation> processes{};  // whose digests these are
  };
  struct Strike {
    Step committed;
    std::vector<Incarnation> blamed;  // the receiver first
  };

  Verdict repeat(Inspection inspection, std::span<const Voter> voters);
  void explain();
  bool explain_by_hop(const Inspection& inspection, Strike& strike);
  std::optional<Verdict> struck_out(std::span<const Voter> voters, Step committed);
  std::optional<bool> has_the_right_state(const Voter& voter, std::span<const Voter> voters);
  std::string struck_steps() const;
  Verdict judge_state() const;
  std::string place_of(std::uint32_t right, std::uint32_t wrong) const;
  void note(std::string line);
  Duration digest_time() const;
  std::optional<std::uint64_t> fitting_period() const;  // none: it is set, or not known yet

  const AuditConfig config_;
  const std::uint32_t ranks_;
  std::map<ReplicaId, DigestTable> reported_;  // in this epoch
  std::optional<Inspection> inspection_;
  std::deque<Strike> strikes_;       // the last three
  std::vector<ReplicaId> veterans_;  // contributors of the last commit
  std::uint64_t period_, phase_ = 0;
  bool states_reported_alike_ = true;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> focus_;  // where a drift is: bytes before it, of so many
  std::map<std::uint32_t, std::deque<Duration>> digest_times_;    // by rank, the last ones
  bool measured_anew_ = false;
  TimePoint committed_at_{};
  std::deque<Duration> step_times_;
  Counted counted_;
  std::vector<std::string> notes_;
};

}  // namespace rejoin::membership
