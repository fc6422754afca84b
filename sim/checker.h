// The invariants of the job (docs/concepts.md, "What always holds"), by name, checked on what really happened. Knows
// nothing of how the protocols work.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "control.pb.h"
#include "ftar/communicator.h"
#include "membership/ledger.h"
#include "sim/replay.h"

namespace rejoin::sim {

struct Violation {
  std::string invariant, what;
};

class Checker {
 public:
  Checker(std::string ignore, const Model& model, std::uint32_t ranks, const Travel& travel)
      : ignore_(std::move(ignore)) {
    if (model.exact()) replay_.emplace(model, ranks, travel);
  }
  // A record is on the coordinator's disk.
  void on_record(const proto::LogRecord& record);
  // … and all of them are gone, with everybody who has heard of them. What the next log begins with must be true of
  // them.
  void on_log_lost() {
    log_lost_ = true;
    epoch_ = 0;
  }
  // This log, which is new to it, is the beginning of one of `before`.
  void go_on_from(const Checker& before, const std::vector<proto::LogRecord>& log);
  // A rank begins a step, as this member.
  void on_begun(std::uint32_t rank, Incarnation incarnation, const CodedRing::Member& member) {
    if (replay_) replay_->on_begun(rank, incarnation.value, member);
  }
  // … which contributes, and is told whether its replica leads the step.
  void on_told_who_leads(std::uint32_t replica, std::uint32_t rank, Incarnation incarnation, std::uint64_t step,
                         bool leads);
  // A rank applies this step: its reduced gradients, by bucket.
  void on_reduced(std::uint32_t replica, std::uint32_t rank, std::uint64_t step,
                  const std::vector<ftar::BucketSpec>& buckets);
  // … having trained these samples (contributors), from gradients that were `before` when it handed them over.
  void on_trained(std::uint32_t replica, std::uint32_t rank, std::uint64_t step, const membership::Batch& batch,
                  std::uint64_t before, std::uint64_t after);
  // A rank that contributes has this state (Replay::digest_of).
  void on_state(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t version,
                std::uint64_t digest);
  // From this version on, this instance of a rank has another state than its peers, which is to be found within
  // `steps`.
  void on_wrong(std::uint64_t instance, std::uint64_t version, std::uint64_t steps) {
    wrong_.try_emplace(instance, version + steps);
    replay_.reset();  // until it is found, what it computes goes into everybody's gradients
  }
  bool wrong(std::uint64_t instance) const { return wrong_.contains(instance); }
  void on_gradient_log(std::uint32_t replica, std::uint32_t rank, std::uint64_t bytes, std::uint64_t budget);
  void on_stale_write();
  // At the end. `held`, `handed_back`: samples under way, and waiting to be handed out.
  void on_end(const std::vector<proto::LogRecord>& log, const membership::Ledger& ledger);
  void violate(const std::string& invariant, std::string what);

  const std::optional<Violation>& violation() const { return violation_; }

 private:
  using RankAt = std::pair<std::uint32_t, std::uint64_t>;                        // rank, step
  const std::string ignore_;                                                     // an invariant
  std::optional<Violation> violation_;                                           // the first
  std::map<std::uint64_t, std::map<std::uint32_t, membership::Batch>> decided_;  // step → replica → samples
  std::map<std::uint64_t, std::map<std::uint32_t, membership::Batch>> earlier_;  // … in logs that this one was part of
  std::map<RankAt, std::uint64_t> reduced_, states_;
  struct Lead {
    std::map<std::uint64_t, bool> told;            // by incarnation: what its ranks were told
    std::optional<std::uint32_t> leader;           // a replica
    std::optional<std::set<std::uint64_t>> those;  // who is in the job since that one leads; none: no epoch began then
  };
  std::map<std::uint64_t, Lead> leads_;           // by step
  std::map<std::uint64_t, std::uint64_t> wrong_;  // instances; the last version at which they may still contribute
  struct Suspect {
    std::uint32_t replica = 0;
    std::uint64_t instance = 0, digest = 0;
  };
  void on_wrong_state(const RankAt& at, const Suspect& suspect);
  std::map<RankAt, Suspect> suspects_;  // wrong for too long, if a peer's digest is another one
  std::optional<Replay> replay_;
  void begin_again(const proto::LogRecord& record);
  void begin_step_anew(const proto::LogRecord::EpochBegun& epoch);
  void check_lost();
  std::uint64_t epoch_ = 0;
  bool log_lost_ = false;  // and the next one says nothing yet
};

}  // namespace rejoin::sim
