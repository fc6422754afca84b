// Taking up an earlier instance's decisions.
#include <algorithm>
#include <functional>

#include "base/fail.h"
#include "base/release.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

Result<> Coordinator::recover(const std::vector<proto::LogRecord>& records, TimePoint now) {
  for (const auto& record : records)
    if (auto replayed = replay(record); !replayed) return replayed;
  return take_over(now);
}

Result<> Coordinator::take_over(TimePoint now) {
  (void)pause_detector_.on_tick(now);  // from now on it may be paused
  if (!has_log_) {
    job_ = config_.id;
    describe(*actions_.append.emplace_back().mutable_job());
    return {};
  }
  steps_ = config_.steps;
  if (auto why = ends_too_early(); !why.empty()) return fail(ErrorCode::mismatch, "{}", why);
  now_ = under_way_since_ = now;
  if (ledger_.shares()) plan_step();  // with all who were there, as replay() does it
  if (auto dropped = drop_as_configured(); !dropped) return dropped;
  tell_of_roll_back();
  if (!members_.empty()) recovering_until_ = now + config_.silence;
  audit_.on_recovered();
  plan_step();
  return {};
}

std::string Coordinator::ends_too_early() const {
  if (config_.steps == 0 || committed_.value <= config_.steps) return {};
  return fmt::format(
      "--steps {} says that the job ends before step {}, which is committed: give it {} to look at the finished job, "
      "more to go on, or 0 for no end",
      config_.steps, committed_, committed_);
}

std::string JobConfig::RollBack::text() const {
  return said_at ? fmt::format("{}@{}", to, *said_at) : fmt::format("{}", to);
}

// An operator's word is for one time: one that stays in the settings must not roll back what has been done since.
void Coordinator::tell_of_roll_back() {
  if (!roll_back_to_) return;
  const std::string text = roll_back_to_->text();
  if (word_is_over())
    warn(
        "--roll-back-to {} allows nothing any more: it was for an earlier loss, and the job has gone on since. Take it "
        "out; for another loss there is another word, which the status then names",
        text);
  else if (roll_back_to_->to >= committed_)
    warn("--roll-back-to {} allows nothing: step {} is the last that is committed", text, committed_);
  else
    note("--roll-back-to {}: if nobody comes with the state of step {}, the job goes on from step {} or later", text,
         committed_, roll_back_to_->to);
  if (!may_roll_back()) roll_back_to_.reset();
}

// Said of another loss, or of the one that the job has gone on from: a step has been committed since. Where none has,
// it counts still, as the coordinator that went back by it may have died before it.
bool Coordinator::word_is_over() const {
  if (!roll_back_to_) return false;
  if (roll_back_to_->said_at) return *roll_back_to_->said_at != steps_ever();
  return last_roll_back_ && committed_ > *last_roll_back_;
}

bool Coordinator::may_roll_back() const { return roll_back_to_ && roll_back_to_->to < committed_ && !word_is_over(); }

// It was said of how things stood before the last commit: what is lost from now on is another loss.
void Coordinator::end_word() {
  if (roll_back_to_)
    note("--roll-back-to {} allows nothing any more: the job has gone on. Take it out", roll_back_to_->text());
  roll_back_to_.reset();
}

std::string Coordinator::unused_word() const {
  if (may_roll_back()) return fmt::format("--roll-back-to {}", roll_back_to_->text());
  if (config_.drop && stopped_ && config_.drop->at == committed_)
    return fmt::format("--drop-replica {}@{}", config_.drop->replica, config_.drop->at);
  return {};
}

// With each record that says something of it, when it is decided or replayed.
void Coordinator::note_never_members(const proto::LogRecord& record) {
  if (record.has_incarnated()) never_members_.take(record.incarnated());
  for (const auto& m : record.epoch().members()) never_members_.erase(m.incarnation());
  if (record.has_epoch()) incarnations_before_epoch_ = last_incarnation_;
  if (record.has_committed()) never_members_.erase_up_to(incarnations_before_epoch_);
}

Result<> Coordinator::take_up(const proto::LogRecord::Job& job) {
  if (job.constant_batch() != config_.constant_batch)
    return fail(ErrorCode::mismatch,
                "the log is of a job {} --constant-batch; start with that setting or another log directory",
                job.constant_batch() ? "with" : "without");
  if (job.replicas() != config_.replicas || job.ranks() != config_.ranks || job.batch() != config_.batch)
    return fail(ErrorCode::mismatch,
                "the log is of a job of {} replicas × {} ranks, batch {}; this one has {} × {}, batch {}. Start with "
                "those settings or another log directory",
                job.replicas(), job.ranks(), job.batch(), config_.replicas, config_.ranks, config_.batch);
  const LinkRule links = rule_in(job);
  if (links.full_mesh_members && links != config_.links)
    return fail(ErrorCode::mismatch,
                "the log is of a job with --full-mesh-members {}; this one has {}. Start with that setting or another "
                "log directory",
                *links.full_mesh_members, config_.links.full_mesh_members.value_or(0));
  const std::uint64_t unit = job.unit() != 0 ? job.unit() : JobConfig::unit_before(job.batch(), job.ranks());
  if (job.batch() % unit != 0) return fail(ErrorCode::corrupt, "the log's unit, {}, does not divide its batch", unit);
  ledger_.set_unit(unit);
  links_ = links;
  job_ = job.id();
  return {};
}

Result<> Coordinator::replay(const proto::LogRecord& record) {
  has_log_ = true;
  if (auto taken = take_up(record); !taken) return taken;
  note_never_members(record);
  return {};
}

Result<> Coordinator::take_up(const proto::LogRecord& record) {
  using Record = proto::LogRecord;
  switch (record.kind_case()) {
    case Record::kJob: return take_up(record.job());
    case Record::kSnapshot: return take_up(record.snapshot());
    case Record::kEpoch: return take_up(record.epoch());
    case Record::kCommitted: return take_up(record.committed());
    case Record::kRolledBack: return take_up(record.rolled_back());
    case Record::kIncarnated:
      last_incarnation_ = std::max<std::uint64_t>(last_incarnation_, record.incarnated().incarnation());
      return {};
    case Record::kCaughtUp:
      for (auto& m : members_)
        if (m.incarnation.value == record.caught_up().incarnation()) m.complete = true;
      return {};
    case Record::kStopped:
      stopped_ = record.stopped().reason();
      differing_.clear();
      for (auto replica : record.stopped().replicas()) differing_.push_back(ReplicaId(replica));
      return {};
    case Record::kDropped:
      stopped_.reset();
      if (SuspendedReplica* out = out_for_now(ReplicaId(record.dropped().replica())))
        out->ended = true;  // not taken back
      return {};
    case Record::kDeclared: declarations_.set_first(FirstDeclared::from(record.declared())); return {};
    case Record::kLed: return {};
    case Record::kNeeds:
      if (record.needs().protocol() <= kProtocolVersion) return {};
      break;
    case Record::KIND_NOT_SET: break;
  }
  return fail(ErrorCode::mismatch,
              "a log record of a kind that this release ({}, protocol {}) does not know: a later one has written it. "
              "Start the coordinator with that, or the job from a checkpoint with a new log directory",
              release(), Versions{}.text());
}

Result<> Coordinator::take_up(const proto::LogRecord::EpochBegun& begun) {
  if (begun.epoch() <= epoch_.value || begun.step() != committed_.value + 1)
    return fail(ErrorCode::corrupt,
                "the log's epoch {}, which begins with step {}, does not follow epoch {} after step {}", begun.epoch(),
                begun.step(), epoch_.value, committed_.value);
  // Shared with those who were there when it began.
  if (ledger_.shares() && !begun.fresh()) plan_step();
  epoch_ = Epoch(begun.epoch());
  protocol_ = Spoken::in_epoch(begun.protocol());
  const auto before = members_.take();
  const auto out_before = std::exchange(suspended_, {});
  const auto was = [](const auto& those, std::uint64_t incarnation, auto what) {
    return std::ranges::any_of(
        those, [&](const auto& one) { return one.incarnation.value == incarnation && std::invoke(what, one); });
  };
  for (const auto& m : begun.members())
    members_.add({.replica = ReplicaId(m.replica()),
                  .incarnation = Incarnation(m.incarnation()),
                  .catching_up = m.catching_up(),
                  .complete = was(before, m.incarnation(), &MemberState::complete)});
  for (const auto& m : begun.suspended()) {
    const auto before_too = std::ranges::find(out_before, Incarnation(m.incarnation()), &SuspendedReplica::incarnation);
    if (before_too != out_before.end()) suspended_.push_back(*before_too);
    else
      suspended_.push_back(
          {.replica = ReplicaId(m.replica()), .incarnation = Incarnation(m.incarnation()), .reason = {}});
  }
  leader_ = begun.has_leader() ? std::optional(ReplicaId(begun.leader())) : std::nullopt;
  note_outages(begun, std::nullopt);
  if (members_.empty()) stopped_.reset(), differing_.clear();
  const auto hand_back_of_gone = [&](const auto& those) {
    for (const auto& one : those)
      if (members_.find(one.replica) == nullptr && out_for_now(one.replica) == nullptr) ledger_.hand_back(one.replica);
  };
  hand_back_of_gone(before);
  hand_back_of_gone(out_before);
  plan_step();
  return {};
}

Result<> Coordinator::take_up(const proto::LogRecord::Committed& committed) {
  if (committed.step() != committed_.value + 1)
    return fail(ErrorCode::corrupt, "the log commits step {} after step {}", committed.step(), committed_.value);
  plan_step();
  for (const auto& m : committed.members()) {
    if (const Batch* own = ledger_.batch_of(ReplicaId(m.replica())); own == nullptr || *own != batch_of(m))
      return fail(ErrorCode::corrupt,
                  "the log says that replica {} trained other samples in step {} than those that follow from the "
                  "records before it; restore it from a copy",
                  m.replica(), committed.step());
  }
  committed_ = Step(committed.step());
  most_committed_ = std::max(most_committed_, committed_);
  give_up_suspended();
  ledger_.commit(committed_);
  leader_ = first_contributor();
  if (committed.has_balance()) ledger_.set_next(Balance::from(committed.balance()));
  if (!ledger_.shares()) plan_step();
  return {};
}

Result<> Coordinator::take_up(const proto::LogRecord::RolledBack& rolled_back) {
  const Step to(rolled_back.version());
  if (!rolled_back.in_order())
    return fail(ErrorCode::mismatch,
                "the log was rolled back to step {} by an older Rejoin, which handed samples out in another order. "
                "Start the job from a checkpoint with a new log directory",
                to);
  if (committed_ > to) {
    last_roll_back_ = to;
    steps_rolled_back_ += committed_.value - to.value;
  }
  committed_ = to;
  most_committed_ = std::max(most_committed_, committed_);
  // What is written of the samples holds, since the ledger may reach further back now than it did then, or less far.
  const Samples trained(rolled_back.trained(), kMostSamples);
  if (trained.empty() && ledger_.trained_at(committed_)) ledger_.roll_back(committed_);
  else if (trained.empty() && committed_ != Step{})
    return fail(ErrorCode::corrupt,
                "the log goes on from step {}, and nothing says what was trained by then; restore it from a copy",
                committed_);
  else ledger_.go_on_from(committed_, trained);
  return {};
}

}  // namespace rejoin::membership
