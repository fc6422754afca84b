// What a standby reads in the store, and when it claims the lead.
#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "base/fail.h"
#include "membership/log.h"
#include "membership/replicated_coordinator.h"

namespace rejoin::membership {

using Kind = StoreRequest::Kind;
using Outcome = StoreAnswer::Outcome;

namespace {
constexpr const char* kPutBack =
    "Where what is in the store came there by mistake: end all coordinators of that --job, delete its keys "
    "(etcdctl del --prefix /rejoin/JOB/), and give the store this job's decisions, in the longest copy, with 'rejoin "
    "log import'";
}  // namespace

void ReplicatedCoordinator::learn_of_leader(std::uint64_t revision, const std::string& leader, TimePoint now) {
  if (revision == leader_revision_ && leader == leader_bytes_) return;
  leader_revision_ = revision;
  leader_bytes_ = leader;
  leader_ = {};
  if (!leader_.ParseFromString(leader))
    return fail_with(ErrorCode::corrupt, "the store's key `leader` holds something else than this version writes");
  if (const auto& keys = options_.keys;
      leader_.key() != 0 && !keys.empty() && std::ranges::find(keys, leader_.key()) == keys.end())
    return fail_with(
        ErrorCode::invalid_argument,
        fmt::format("{} at {} was the last to lead this job in the store, with another job key. If it is this job "
                    "with a new key, start once with --other-job-key-file OLD, or see 'A new job key' in "
                    "docs/operations.md; if it is another job, start with a --job of its own",
                    leader_.name(), leader_.address()));
  leader_since_ = sign_at_ = now;
  if (leader_.instance() != 0 && !is_own(leader_)) {
    steps_led_ = leader_.has_steps() ? std::optional(leader_.steps()) : std::nullopt;
    note(false, "{} at {} leads in term {}", leader_.name(), leader_.address(), leader_.term());
  }
  tell_who_leads(all_nodes());
}

void ReplicatedCoordinator::on_read(const StoreRequest& request, const StoreAnswer& answer, TimePoint now) {
  if (role_ == Role::reading && !leads_still(answer)) return follow(answer, now);
  if (role_ == Role::following) learn_of_leader(answer.leader_revision, answer.leader, now);
  if (actions_.failed) return;
  const bool more_known = !answer.entries.empty() && answer.entries.back().first >= position_;
  if (answer.alive_revision != alive_revision_ || more_known) sign_at_ = now;
  if (more_known || answer.snapshot_position > position_) lacks_since_.reset();
  alive_revision_ = answer.alive_revision;
  const bool entry_there = !answer.entries.empty() && answer.entries.front().first == last_entry_;
  const bool there =
      !answer.snapshot.empty() || entry_there ||
      (last_entry_ == position_ && answer.snapshot_position == position_);  // it knows the snapshot alone
  const bool verified = std::exchange(verifies_, false);
  if (verified && there) lacks_since_.reset();
  if (verified && !there && role_ == Role::following) {
    if (!lacks_since_) lacks_since_ = now;
    return try_claim(now, true);
  }
  if (verified && !there) {
    note(true, "the store was set back: what it had of this job is forgotten here, too");
    forget();
    return read(true, now);
  }
  if (!has_read_ && !answer.more && !copy_fits(answer)) return;
  const std::uint64_t wanted = position_;
  if (!take_in(answer)) {
    if (actions_.failed) return;
    if (request.recent && answer.entries.front().first > wanted)
      return fail_with(
          ErrorCode::corrupt,
          fmt::format("the store's log lacks the records from {} to {}: its data was set back under a leader. "
                      "Put the data back, or give it a copy with 'rejoin log import'",
                      wanted, answer.entries.front().first - 1));
    // Records that were there have gone into a snapshot meanwhile.
    reads_recent_ = true;
    if (role_ == Role::reading)
      again_ = StoreRequest{.kind = Kind::read, .position = position_, .leader = {}, .value = {}, .recent = true};
    return;
  }
  if (answer.more) return read(role_ == Role::reading || !has_read_, now);
  const bool first = !std::exchange(has_read_, true);
  if (!steps_at_start_)
    if (auto why = machine_->ends_too_early(); !why.empty())
      return fail_with(ErrorCode::invalid_argument, std::move(why));
  if (!steps_at_start_) steps_at_start_ = machine_->steps_ever();
  if (machine_->steps_ever() != *steps_at_start_) machine_->end_word();
  if (!predecessor_) {
    const bool same_place = leader_.address() == options_.address && leader_.name() == options_.name;
    predecessor_ = same_place && leader_.instance() != options_.instance ? leader_.instance() : 0;
  }
  if (role_ == Role::reading) return lead(now);
  look_at_steps();
  // A claim without an answer was done after all.
  if (leader_.instance() == options_.instance && leader_.term() != 0 && !outranked()) return read_for_lead(now);
  try_claim(now, request.recent && (verified || first || position_ == 0));
  if (const auto word = unheeded_word(); first && !under_way_ && !word.empty()) note(true, "{}", word);
}

std::string ReplicatedCoordinator::unheeded_word() const {
  const std::string word = other_leads() && has_read_ ? machine_->unused_word() : std::string();
  if (word.empty()) return {};
  return fmt::format(
      "{} counts once this coordinator leads; {} at {} does, by its own settings: start that one with it, too, or take "
      "it out here",
      word, leader_.name(), leader_.address());
}

// An older release does not say with which it leads.
void ReplicatedCoordinator::look_at_steps() {
  const std::uint64_t own = machine_->ends_too_early().empty() ? options_.job.steps : 0;
  machine_->set_steps(other_leads() && leader_.has_steps() ? leader_.steps() : own);
  auto line = other_steps();
  if (!line.empty() && line != steps_said_) note(true, "{}", line);
  steps_said_ = std::move(line);
}

std::string ReplicatedCoordinator::other_steps() const {
  const std::uint64_t own = options_.job.steps;
  if (role_ != Role::following || !has_read_) return {};
  const std::string leads = other_leads() ? fmt::format("{} at {}", leader_.name(), leader_.address()) : "";
  const std::string with = leader_.has_steps() ? fmt::format(" with --steps {}", leader_.steps()) : "";
  if (!machine_->ends_too_early().empty())
    return fmt::format(
        "--steps {} says that the job ends before a step that is committed: this coordinator takes no lead with that. "
        "Start it with as many as the others{}",
        own, leads.empty() ? "" : fmt::format("; {} leads{}", leads, with));
  if (leads.empty() || !leader_.has_steps() || leader_.steps() == own) return {};
  return fmt::format("--steps {} counts once this coordinator leads; {} does{}: start all of them with the same", own,
                     leads, with);
}

Duration ReplicatedCoordinator::no_sign_for(TimePoint now) const {
  const Duration lasting = now - sign_at_;
  const bool too_long = lasting > deadlines::kAbandoned.of(options_.job.silence);
  return other_leads() && has_read_ && !failing_ && too_long ? lasting : Duration{};
}

// What others have appended before this one's claim. Nothing can follow on that but what this one writes.
void ReplicatedCoordinator::read_for_lead(TimePoint now) {
  role_ = Role::reading;
  token_ = leader_revision_;
  read(true, now, true);
}

// The copy on this disk must be of this job, and can't have more than the store.
bool ReplicatedCoordinator::copy_fits(const StoreAnswer& answer) {
  std::uint64_t end = std::max(position_, answer.snapshot_position);
  if (!answer.entries.empty()) {
    proto::LogEntry last;
    if (!last.ParseFromString(answer.entries.back().second)) return true;  // told where it is taken in
    end = std::max(end, answer.entries.back().first + static_cast<std::uint64_t>(last.records_size()));
  }
  if (copied_ <= end) return true;
  fail_with(ErrorCode::mismatch,
            end == 0 && !options_.copy_unread.empty()
                ? fmt::format("the store holds nothing of this job, and the decisions in --log-directory can't be read "
                              "({}): the store's data may be lost, or it is another store or --job. See to that, or "
                              "start a new job with another --log-directory",
                              options_.copy_unread)
            : end == 0
                ? fmt::format("the store holds nothing of this job, and the decisions in --log-directory are {}: the "
                              "store's data is lost, or it is another store or --job. Put the data back; or give it "
                              "the decisions with 'rejoin log import'; or start a new job with another --log-directory",
                              copied_)
                : fmt::format("the store has {} decisions of this job, and --log-directory has {}: the store's data is "
                              "an older copy. Put the data back; or give it the decisions with 'rejoin log import'; or "
                              "go on from what it has, with another --log-directory",
                              end, copied_));
  return false;
}

Result<std::string> ReplicatedCoordinator::landmark_of(const std::vector<proto::LogRecord>& copy,
                                                       const JobConfig& job) {
  Coordinator machine(job);
  for (const auto& record : copy)
    if (auto replayed = machine.replay(record); !replayed) {
      if (replayed.error().code == ErrorCode::mismatch) return std::string();
      return tl::unexpected(replayed.error());
    }
  return copy.empty() ? std::string() : machine.landmark();
}

// A store that went on from less than the copy has may have come as far since, with other decisions.
bool ReplicatedCoordinator::is_of_copy() {
  const auto& [at, known] = landmark_;
  const std::string here = machine_->landmark();
  if (known.empty() || known == here) return true;
  fail_with(ErrorCode::mismatch,
            fmt::format("the store's first {} decisions are others than those in --log-directory (they lead to {}, and "
                        "its own to {}): the store went on from an older copy. Put the data back; or give it the "
                        "decisions with 'rejoin log import'; or go on from what it has, with another --log-directory",
                        at, here, known));
  return false;
}

// A job does not become another one: somebody has put another one's decisions there, or begun another one.
bool ReplicatedCoordinator::is_of_own_job(std::uint64_t job) {
  if (own_job_ == 0 || job == 0 || job == own_job_) return true;
  if (own_job_ == options_.copied_job && !steps_at_start_)  // this process has never read its own job's
    fail_with(ErrorCode::mismatch,
              fmt::format("the store's decisions are of job {0:016x}, and those in --log-directory of job {1:016x}: "
                          "start with another --log-directory, or with the --job that is meant. {2}",
                          job, own_job_, kPutBack));
  else
    fail_with(ErrorCode::mismatch,
              fmt::format("the store's decisions are of job {0:016x} now, and this coordinator is of job {1:016x}: "
                          "start with the --job that is meant. {2}",
                          job, own_job_, kPutBack));
  return false;
}

// False where it does not follow on what is known, or can't be read (`failed`).
bool ReplicatedCoordinator::take_in(const StoreAnswer& answer) {
  snapshot_at_ = answer.snapshot_position;
  snapshot_revision_ = answer.snapshot_revision;
  if (!answer.snapshot.empty() && answer.snapshot_position > position_) {
    proto::LogRecord snapshot;
    if (!snapshot.ParseFromString(answer.snapshot) || !snapshot.has_snapshot()) {
      fail_with(ErrorCode::corrupt, "the store's snapshot is damaged");
      return false;
    }
    machine_ = std::make_unique<Coordinator>(options_.job);
    position_ = answer.snapshot_position - 1;
    last_entry_ = answer.snapshot_position;
    if (answer.snapshot_position > copied_) {
      actions_.copy_from = snapshot;
      actions_.copy.clear();
      copied_ = answer.snapshot_position;
    }
    if (!take_in(snapshot)) return false;
  }
  for (const auto& [position, bytes] : answer.entries) {
    proto::LogEntry entry;
    if (!entry.ParseFromString(bytes) || entry.records_size() == 0) {
      fail_with(ErrorCode::corrupt, fmt::format("the store's log is damaged at record {}", position));
      return false;
    }
    if (position < position_) continue;
    if (position > position_) return false;
    last_entry_ = position;
    for (const auto& record : entry.records())
      if (!take_in(record)) return false;
  }
  return true;
}

bool ReplicatedCoordinator::take_in(const proto::LogRecord& record) {
  if ((record.has_job() || record.has_snapshot()) && !is_of_own_job(job_of(record).id())) return false;
  if (auto replayed = machine_->replay(record); !replayed) {
    // Another time it would not fit either, unlike what else does not match here: a store may be put back, and a later
    // release started.
    const bool other_settings =
        replayed.error().code == ErrorCode::mismatch && (record.has_job() || record.has_snapshot());
    fail_with(other_settings ? ErrorCode::invalid_argument : replayed.error().code,
              fmt::format("record {} of the store's log: {}", position_, replayed.error().message));
    return false;
  }
  job_ = machine_->job();
  if (job_ != 0) own_job_ = job_;
  ++position_;
  if (position_ == landmark_.first && !is_of_copy()) return false;
  if (position_ <= copied_) return true;
  ++copied_;
  actions_.copy.push_back(record);
  return true;
}

// By the clock that was right when this process began: one that is set meanwhile makes no lead longer or shorter.
std::uint64_t ReplicatedCoordinator::ms_since_1970(TimePoint now) const {
  return options_.started_ms + static_cast<std::uint64_t>(milliseconds(now - started_));
}

Duration ReplicatedCoordinator::led_for(TimePoint now) const {
  if (leader_.since_ms() == 0) return Duration{};  // nobody does, or has not said it
  const std::uint64_t here = ms_since_1970(now), since = leader_.since_ms();
  return std::max<Duration>(now - leader_since_, std::chrono::milliseconds(here > since ? here - since : 0));
}

// ---- the lead

// Who has not heard this leader yet can't have lost it, unless there was time to hear it. That a leader can't write is
// a reason only for who can.
ReplicatedCoordinator::Lost ReplicatedCoordinator::who_lost_the_leader(TimePoint now) const {
  const Duration silence = options_.job.silence;
  const bool known = now - leader_since_ > patience();
  Lost lost;
  std::map<ReplicaId, RankSet> counted;
  for (const auto& [node, of] : nodes_) {
    if (!of.view || is_of_another_job(of) || now - of.heard > silence || now < of.settled) continue;
    const bool current = of.view->led_term() >= leader_.term();
    const bool can_write = !of.view->stalled() || answered_ > of.stalled_since;
    lost.somebody_hears |= (!of.view->lost() || of.view->stalled()) && current;
    if (!of.view->lost() || !can_write || !(known || current)) continue;
    lost.by_somebody = true;
    for (const auto& host : of.view->hosts())
      counted[ReplicaId(host.replica())].add(RankSet(host.ranks(), options_.job.ranks));
  }
  for (const auto& member : machine_->members())
    if (auto found = counted.find(member.replica); found != counted.end()) lost.ranks += found->second.size();
  return lost;
}

std::optional<std::string> ReplicatedCoordinator::reason_to_claim(TimePoint now) const {
  if (role_ != Role::following || !has_read_ || under_way_ || again_ || pause_detector_.settling(now)) return {};
  if (now < claim_again_ || !machine_->ends_too_early().empty()) return {};
  const Duration silence = options_.job.silence;
  // The leader, where there is one, puts there what is lost; who comes before it has less, and can't go on.
  if (lacks_since_ && leader_.instance() != 0 && now - *lacks_since_ <= deadlines::kAbandoned.of(silence)) return {};
  if (leader_.term() == 0) return "nobody has led yet";
  if (leader_.instance() == 0) return "nobody leads since decisions were imported";
  if (predecessor_.value_or(0) != 0 && leader_.instance() == *predecessor_)
    return fmt::format("who led before had this one's name and address, {} at {}", leader_.name(), leader_.address());
  if (gave_up_ && leader_.instance() == options_.instance) return "it has given up the lead, and nobody has taken it";
  if (outranked()) return "nodes know a higher term than the store does";
  const Duration no_sign = now - sign_at_;
  const Lost lost = who_lost_the_leader(now);
  const std::uint64_t all = machine_->members().size() * std::uint64_t{options_.job.ranks};
  if (2 * lost.ranks > all)
    return fmt::format("the nodes of {} of {} ranks have lost {} at {}", lost.ranks, all, leader_.name(),
                       leader_.address());
  if (!lost.by_somebody || lost.somebody_hears) return {};
  if (all == 0) return fmt::format("a node has lost {} at {}", leader_.name(), leader_.address());
  // Two sides of a cut may have half of the ranks each, but a leader on one of them shows in the store.
  const bool half = 2 * lost.ranks == all;
  const Duration long_enough =
      half ? deadlines::kTakeover.of(silence) + deadlines::kLeaderSign.of(silence) : deadlines::kAbandoned.of(silence);
  if (no_sign <= long_enough) return {};
  return fmt::format("the store shows no sign of {} at {} for {:.0f} ms, and no node hears it", leader_.name(),
                     leader_.address(), milliseconds(no_sign));
}

// Who the members are is read once more before a claim: a replica that has just been admitted counts too. So is what
// this one knows, which the store may have lost.
void ReplicatedCoordinator::try_claim(TimePoint now, bool has_read_now) {
  const auto why = reason_to_claim(now);
  if (!why) return;
  if (!has_read_now) return read(true, now, true);
  proto::Leader claim;
  claim.set_term(std::max(leader_.term(), heard_term_) + 1);
  claim.set_name(options_.name);
  claim.set_address(options_.address);
  claim.set_instance(options_.instance);
  claim.set_since_ms(ms_since_1970(now));
  claim.set_steps(options_.job.steps);
  claim.set_silence_ms(static_cast<std::uint64_t>(milliseconds(options_.job.silence)));
  role_ = Role::claiming;
  // Where the store does not answer, the same is tried again and again.
  if (claim_reported_ != claim.term()) note(false, "claims the lead, in term {}: {}", claim.term(), *why);
  claim_reported_ = claim.term();
  if (!options_.keys.empty()) claim.set_key(options_.keys.front());
  submit({.kind = Kind::claim, .token = leader_revision_, .leader = leader_bytes_, .value = claim.SerializeAsString()},
         now);
}

void ReplicatedCoordinator::on_claim(const StoreRequest& request, const StoreAnswer& answer, TimePoint now) {
  learn_of_leader(answer.leader_revision, answer.outcome == Outcome::done ? request.value : answer.leader, now);
  if (leader_.instance() != options_.instance || leader_.term() == 0) {
    role_ = Role::following;
    return;
  }
  read_for_lead(now);
}

}  // namespace rejoin::membership
