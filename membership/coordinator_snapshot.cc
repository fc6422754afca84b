// All that recovery knows, as one record, and back. Of what a coordinator knows beyond that (who is registered, who has
// said what) nothing is kept: ranks come again and say it anew.
#include <fmt/format.h>

#include <tuple>

#include "base/digest.h"
#include "base/fail.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

namespace {

void put(const auto& member, proto::Member& to) {
  to.set_replica(member.replica.value);
  to.set_incarnation(member.incarnation.value);
}

}  // namespace

void Coordinator::describe(proto::LogRecord::Job& job) const {
  job.set_replicas(config_.replicas);
  job.set_ranks(config_.ranks);
  job.set_batch(config_.batch);
  job.set_constant_batch(config_.constant_batch);
  job.set_unit(static_cast<std::uint32_t>(ledger_.unit()));
  job.set_id(job_);
  put_rule(links_, job);
}

proto::LogRecord Coordinator::snapshot() const {
  proto::LogRecord record;
  auto& to = *record.mutable_snapshot();
  describe(*to.mutable_job());
  to.set_epoch(epoch_.value);
  to.set_committed(committed_.value);
  to.set_most_committed(most_committed_.value);
  to.set_last_incarnation(last_incarnation_);
  for (const auto& m : members_) {
    auto& member = *to.add_members();
    put(m, member);
    member.set_catching_up(m.catching_up);
    if (m.complete) to.add_complete(m.incarnation.value);
  }
  for (const auto& out : suspended_) {
    put(out, *to.add_suspended());
    if (out.ended) to.add_ended(out.replica.value);
  }
  never_members_.to(to);
  to.set_incarnations_before_epoch(incarnations_before_epoch_);
  if (last_roll_back_) to.set_last_roll_back(last_roll_back_->value);
  to.set_steps_rolled_back(steps_rolled_back_);
  if (stopped_) to.set_stopped(*stopped_);
  for (auto replica : differing_) to.add_differing(replica.value);
  if (const auto& first = declarations_.first()) first->to(*to.mutable_declared());
  for (const auto& [replica, out] : out_) {
    auto& one = *to.add_out();
    one.set_replica(replica.value);
    one.set_why(out.why);
  }
  ledger_.to(*to.mutable_ledger());
  if (protocol_.version() > kSilentProtocol) to.set_protocol(protocol_.version());
  if (leader_) to.set_leader(leader_->value);
  return record;
}

bool Coordinator::has_recovered_like(const Coordinator& other) const {
  const auto all_of = [](const Coordinator& of) {
    std::vector<std::tuple<ReplicaId, Incarnation, bool, bool>> members;
    for (const auto& m : of.members_) members.emplace_back(m.replica, m.incarnation, m.catching_up, m.complete);
    std::vector<std::tuple<ReplicaId, Incarnation, bool>> suspended;
    for (const auto& out : of.suspended_) suspended.emplace_back(out.replica, out.incarnation, out.ended);
    std::vector<std::pair<ReplicaId, std::string>> out;
    for (const auto& [replica, one] : of.out_) out.emplace_back(replica, one.why);
    const auto first = of.declarations_.first() ? *of.declarations_.first() : FirstDeclared{};
    return std::tuple(of.ledger_, of.epoch_, of.committed_, of.job_, of.most_committed_, of.last_incarnation_,
                      std::pair(first.replica, first.ranks), of.never_members_, of.incarnations_before_epoch_,
                      of.steps_rolled_back_, members, suspended, out, of.last_roll_back_, of.stopped_, of.differing_,
                      of.protocol_.version(), of.leader_);
  };
  return all_of(*this) == all_of(other);
}

// Of what every release has written, also into snapshots.
std::string Coordinator::landmark() const {
  std::string members;
  for (const auto& m : members_) members += fmt::format(" {}:{}{}", m.replica, m.incarnation, m.catching_up ? "c" : "");
  std::uint64_t trained = 0;
  for (const auto& [begin, end] : ledger_.trained().ranges())
    trained = combine_digests(combine_digests(trained, begin), end);
  return fmt::format("step {} in epoch {}, incarnation {}, members{}, samples {:x}", committed_, epoch_,
                     last_incarnation_, members, trained);
}

// It stands for all records before it, of which there are none in the log any more.
Result<> Coordinator::take_up(const proto::LogRecord::Snapshot& from) {
  if (epoch_ != Epoch{} || committed_ != Step{} || job_ != 0)
    return fail(ErrorCode::corrupt, "the log has a snapshot, of step {}, that is not its first record",
                from.committed());
  if (auto job = take_up(from.job()); !job) return job;
  epoch_ = Epoch(from.epoch());
  protocol_ = Spoken::in_epoch(from.protocol());
  if (from.has_leader()) leader_ = ReplicaId(from.leader());
  committed_ = Step(from.committed());
  most_committed_ = Step(from.most_committed());
  last_incarnation_ = from.last_incarnation();
  const std::set<std::uint64_t> complete(from.complete().begin(), from.complete().end());
  for (const auto& m : from.members())
    members_.add({.replica = ReplicaId(m.replica()),
                  .incarnation = Incarnation(m.incarnation()),
                  .catching_up = m.catching_up(),
                  .complete = complete.contains(m.incarnation()),
                  .reduced = {}});
  const std::set<std::uint32_t> ended(from.ended().begin(), from.ended().end());
  for (const auto& out : from.suspended())
    suspended_.push_back({.replica = ReplicaId(out.replica()),
                          .incarnation = Incarnation(out.incarnation()),
                          .reason = "it was silent",
                          .ended = ended.contains(out.replica())});
  never_members_ = NeverMembers::from(from);
  incarnations_before_epoch_ = from.incarnations_before_epoch();
  if (from.has_last_roll_back()) last_roll_back_ = Step(from.last_roll_back());
  steps_rolled_back_ = from.steps_rolled_back();
  if (from.has_stopped()) stopped_ = from.stopped();
  for (auto replica : from.differing()) differing_.push_back(ReplicaId(replica));
  if (from.has_declared()) declarations_.set_first(FirstDeclared::from(from.declared()));
  for (const auto& out : from.out()) {
    out_[ReplicaId(out.replica())] = {out.why(), std::nullopt};
    if (SuspendedReplica* for_now = out_for_now(ReplicaId(out.replica()))) for_now->reason = out.why();
  }
  ledger_.take_up(from.ledger(), committed_);
  return {};
}

}  // namespace rejoin::membership
