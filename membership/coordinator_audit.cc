// What becomes of a step whose results, or the states before it, differ among replicas.
#include <algorithm>

#include "base/fail.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

// Whether the step that all have reduced may be committed.
bool Coordinator::differences_settled() {
  std::vector<DriftAudit::Voter> voters;
  for (const auto& m : members_) voters.push_back({m.replica, m.incarnation, !m.catching_up});
  const DriftAudit::Verdict verdict = audit_.judge(voters, epoch_, committed_);
  for (auto& line : audit_.take_notes()) warn("{}", line);
  using Kind = DriftAudit::Verdict::Kind;
  switch (verdict.kind) {
    case Kind::agree: return true;
    case Kind::suspend: put_out_for_now(verdict.replica, verdict.reason); return false;
    case Kind::remove: remove(verdict.replica, verdict.reason); return false;
    case Kind::repeat: break;
    case Kind::stop: {
      proto::LogRecord record;
      record.mutable_stopped()->set_step(committed_.value);
      record.mutable_stopped()->set_reason(verdict.reason);
      for (auto replica : verdict.among) record.mutable_stopped()->add_replicas(replica.value);
      actions_.append.push_back(std::move(record));
      stopped_ = verdict.reason;
      differing_ = verdict.among;
      break;
    }
  }
  next_epoch(verdict.reason);
  return false;
}

// Where the job is stopped nothing is committed, so that nobody who is out becomes a joiner: who is back is a member.
void Coordinator::take_back_while_stopped(ReplicaId replica) {
  const SuspendedReplica* out = out_for_now(replica);
  if (!stopped_ || recovering_until_ || out == nullptr || !present(replica, out->incarnation)) return;
  if (take_back(Whom::connected)) next_epoch(fmt::format("replica {} is back, and the job is stopped", replica));
}

// Once: only while the job is stopped at the very step that the operator has seen.
Result<> Coordinator::drop_as_configured() {
  if (!config_.drop) return {};
  const auto& [replica, at] = *config_.drop;
  if (!stopped_ || at != committed_) {
    warn("--drop-replica {}@{} changes nothing: the job is {} after step {}", replica, at,
         stopped_ ? "stopped" : "not stopped", committed_);
    return {};
  }
  const MemberState* dropped = members_.find(replica);
  // One that has ended since may be named: it was wrong, and the others are right.
  if (!differing_.empty() && std::find(differing_.begin(), differing_.end(), replica) == differing_.end()) {
    // It may be the word of a stop at the same step, among more of them.
    const bool was_used = dropped == nullptr && replica.value < config_.replicas;
    const auto why = fmt::format("--drop-replica {}@{}{}: replica {} is none of those that differ, which are {}",
                                 replica, at, was_used ? " changes nothing" : "", replica, fmt::join(differing_, ", "));
    if (!was_used) return fail(ErrorCode::mismatch, "{}", why);  // it never becomes right
    warn("{}", why);
    return {};
  }
  if (dropped != nullptr && !dropped->catching_up && !another_holds(replica))
    return fail(ErrorCode::mismatch, "--drop-replica {}@{}: no other replica has the state", replica, at);
  proto::LogRecord record;
  record.mutable_dropped()->set_step(at.value);
  record.mutable_dropped()->set_replica(replica.value);
  actions_.append.push_back(record);
  REJOIN_CHECK(replay(record));
  warn("replica {} is dropped at the operator's word", replica);
  if (dropped == nullptr) return {};
  ledger_.hand_back(replica);
  members_.erase(replica);
  if (!take_back(Whom::all) && !has_contributors()) promote_caught_up(Whom::all);
  begin_epoch(fmt::format("without replica {}: dropped by an operator", replica));
  return {};
}

}  // namespace rejoin::membership
