#include "membership/replicated_coordinator.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "base/fail.h"

namespace rejoin::membership {

using Kind = StoreRequest::Kind;
using Outcome = StoreAnswer::Outcome;

namespace {
constexpr std::uint64_t kMostTerms = std::uint64_t{1} << 62;  // nobody comes so far
constexpr int kLinesApart = 5;  // silences, between two lines of one kind: a store may fail every other time
}  // namespace

ReplicatedCoordinator::ReplicatedCoordinator(Options options, TimePoint now)
    : options_(std::move(options)),
      started_(now),
      copied_(options_.copied),
      landmark_(options_.copied, options_.copied_landmark),
      own_job_(options_.copied_job),
      leader_since_(now),
      sign_at_(now),
      pause_detector_(options_.job.silence),
      now_(now),
      failing_said_(kLinesApart * options_.job.silence),
      stall_said_(kLinesApart * options_.job.silence),
      set_back_said_(kLinesApart * options_.job.silence) {
  forget();
}

// What it knows of the decisions: it begins with the store's snapshot again.
void ReplicatedCoordinator::forget() {
  if (queue_.empty() && snapshot()) landmark_ = {copied_, machine_->landmark()};
  machine_ = std::make_unique<Coordinator>(options_.job);
  position_ = 0;
  queue_.clear();
  closing_.clear();
  queued_bytes_ = 0;
  confirming_ = appending_ = 0;
  due_.reset();
  again_.reset();
  snapshot_at_ = tried_at_ = last_entry_ = claim_reported_ = 0;
  verifies_ = set_back_told_ = false;
  set_back_.clear();
  lacks_since_.reset();
  has_read_ = stalled_ = stall_logged_ = waits_reported_ = suspects_itself_ = false;
}

void ReplicatedCoordinator::fail_with(ErrorCode code, std::string why) {
  if (!actions_.failed) actions_.failed = Error{code, std::move(why)};
}

// ---- nodes

ReplicatedCoordinator::Actions ReplicatedCoordinator::on_message(NodeId node, const proto::FromNode& message,
                                                                 TimePoint now) {
  now_ = now;
  NodeView& from = nodes_[node];
  // Behind a cut that is over comes what was said in its time.
  if (from.heard != TimePoint{} && now - from.heard > options_.job.silence / 4)
    from.settled = now + options_.job.silence / 8;
  from.heard = now;
  if (!is_of_another_job(from)) heard_at_ = now;
  if (message.has_hello()) {
    from.hello = message;
    tell_who_leads({node});
  }
  if (message.has_leader_view()) {
    on_view(from, message.leader_view());
    if (role_ == Role::leading) {
      if (!closing_.contains(node)) machine_->on_sign_of_life(node, now);
      if (!of_coordinators_ || of_coordinators_->version() < kProtocolVersion)
        look_at_versions();  // otherwise the next tick is soon enough
      write_next(now);
    } else {
      tell_who_leads({node});
      try_claim(now);
    }
  } else if (role_ == Role::leading && !closing_.contains(node)) {
    enqueue(machine_->on_message(node, message, now));
    write_next(now);
  }
  return take();
}

void ReplicatedCoordinator::on_view(NodeView& from, const proto::LeaderView& view) {
  from.view = view;
  const bool counts = !is_of_another_job(from);
  if (auto line = counts || told_of_another_job_ ? "" : of_another_job(from); !line.empty()) {
    note(true, "{}", line);
    told_of_another_job_ = true;
  }
  if (!counts || !view.stalled()) from.stalled_since = {};
  else if (from.stalled_since == TimePoint{}) from.stalled_since = now_;
  if (!counts) return;
  if (view.term() < kMostTerms) heard_term_ = std::max(heard_term_, view.term());
  suspects_itself_ |= role_ == Role::leading && view.term() > leader_.term();
}

// Until this job is known, a node that knows its own may be anybody's.
bool ReplicatedCoordinator::is_of_another_job(const NodeView& of) const {
  return of.view && of.view->job() != 0 && of.view->job() != job_;
}

std::string ReplicatedCoordinator::of_another_job() const {
  for (const auto& [node, of] : nodes_)
    if (auto line = of_another_job(of); !line.empty()) return line;
  return "";
}

std::string ReplicatedCoordinator::of_another_job(const NodeView& of) const {
  if (job_ == 0 || !of.hello || !is_of_another_job(of)) return "";
  return fmt::format(
      "node {} at {} keeps to job {:016x}, and what is in this coordinator's store is job {:016x}: it is not led "
      "from here. Is the --job or --store of this coordinator another job's, or has that node another job's "
      "--connect, or trainers of a job that is given up?",
      of.hello->hello().node(), of.hello->hello().address(), of.view->job(), job_);
}

ReplicatedCoordinator::Actions ReplicatedCoordinator::on_node_lost(NodeId node, TimePoint now) {
  now_ = now;
  nodes_.erase(node);
  closing_.erase(node);
  for (auto& [decided, bytes] : queue_) {  // what was to be sent there
    for (auto& [to, message] : decided.send) std::erase(to, node);
    std::erase_if(decided.send, [&, &bytes = bytes](const auto& one) {
      if (!one.first.empty()) return false;
      const std::size_t freed = one.second.ByteSizeLong();
      bytes -= freed;
      queued_bytes_ -= freed;
      return true;
    });
  }
  if (role_ == Role::leading) {
    enqueue(machine_->on_node_lost(node, now));
    write_next(now);
  }
  return take();
}

std::vector<NodeId> ReplicatedCoordinator::all_nodes() const {
  std::vector<NodeId> all;
  for (const auto& [node, view] : nodes_)
    if (view.hello) all.push_back(node);
  return all;
}

void ReplicatedCoordinator::tell_who_leads(const std::vector<NodeId>& nodes) {
  if (nodes.empty()) return;
  auto& [to, message] = actions_.send.emplace_back();
  to = nodes;
  auto& leads = *message.mutable_leads();
  leads.set_term(leader_.term());
  leads.set_address(leader_.address());
  leads.set_leads(role_ == Role::leading);
  leads.set_stalled(stalled_ && set_back_.empty());  // where it was set back, who takes over has less than this one
  if (position_ > 0) leads.set_job(job_);
}

ReplicatedCoordinator::Actions ReplicatedCoordinator::on_tick(TimePoint now) {
  now_ = now;
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{}) {
    for (auto& [node, view] : nodes_) forgive(view.heard, pause, now);
    forgive(leader_since_, pause, now);
    for (TimePoint* since : {&sign_at_, &begun_at_, &heard_at_}) forgive(*since, pause, now);
  }
  if (again_) submit_again(now);
  if (told_of_another_job_ && of_another_job().empty()) told_of_another_job_ = false;
  if (role_ == Role::leading) {
    look_at_stall(now);
    if (auto to = all_nodes(); !to.empty()) {
      auto& [nodes, message] = actions_.send.emplace_back();
      nodes = std::move(to);
      message.mutable_heartbeat();
    }
    look_at_versions();
    if (!stalled_) enqueue(machine_->on_tick(now));
    write_next(now);
  } else {
    try_claim(now);
    if (role_ == Role::following && !under_way_) {
      const bool stalled =
          std::ranges::any_of(nodes_, [](const auto& one) { return one.second.stalled_since != TimePoint{}; });
      read(!has_read_ || std::exchange(reads_recent_, false) || stalled, now);
    }
  }
  return take();
}

// What all coordinators speak, by the nodes that have reached them: each of them may take over.
void ReplicatedCoordinator::look_at_versions() {
  std::optional<std::uint32_t> lowest;
  for (const auto& [node, of] : nodes_)
    if (of.view && !is_of_another_job(of))
      lowest = std::min(lowest.value_or(kProtocolVersion), std::max(of.view->coordinators(), kSilentProtocol));
  if (lowest) of_coordinators_ = Spoken(*lowest);
  machine_->set_protocol_of_coordinators(of_coordinators_);
}

// ---- the store

void ReplicatedCoordinator::submit(StoreRequest request, TimePoint now) {
  begun_at_ = asked_at_ = now;
  under_way_ = request;
  actions_.request = std::move(request);
}

void ReplicatedCoordinator::submit_again(TimePoint now) {
  asked_at_ = now;
  under_way_ = std::exchange(again_, std::nullopt);
  actions_.request = under_way_;
}

void ReplicatedCoordinator::read(bool recent, TimePoint now, bool verify) {
  verifies_ = verify && has_read_ && position_ > 0;
  submit({.kind = Kind::read,
          .position = verifies_ ? last_entry_ : position_,
          .leader = {},
          .value = {},
          .recent = recent},
         now);
}

ReplicatedCoordinator::Actions ReplicatedCoordinator::on_answer(const StoreAnswer& answer, TimePoint now) {
  now_ = now;
  if (!under_way_) return take();
  StoreRequest request = *std::exchange(under_way_, std::nullopt);
  // Of a lead that was given up meanwhile. What has become of it shows when it reads again.
  if (request.kind != Kind::read && request.kind != Kind::claim && role_ != Role::leading) return take();
  if (request.kind == Kind::compact) {
    if (request.entry.empty()) on_compacted(request, answer, now);
    else on_mended(request, answer, now);
    write_next(now);
    return take();
  }
  if (request.kind == Kind::claim || (request.kind != Kind::read && answer.outcome != Outcome::unknown))
    took_ = now - begun_at_;
  if (answer.outcome == Outcome::unknown) {
    on_unknown(request, answer.error);
    // A standby reads again anyway, and finds its claim, if that was done.
    if (role_ == Role::claiming) role_ = Role::following;
    else if (role_ != Role::following) again_ = std::move(request);
    bound_queue();
    return take();
  }
  on_answered(request, answer);
  switch (request.kind) {
    case Kind::compact: break;
    case Kind::read:
      if (!set_back(request, answer, now)) on_read(request, answer, now);
      break;
    case Kind::claim:
      if (!set_back(request, answer, now)) on_claim(request, answer, now);
      break;
    case Kind::append:
    case Kind::renew: {
      // Where an earlier try of an append has been done, the log has its very bytes.
      const bool own = request.kind == Kind::append && leads_still(answer) && answer.existing == request.value;
      if (answer.outcome == Outcome::done || own) on_written(now);
      else if (leads_still(answer) && answer.existing.empty()) on_set_back(now);  // that alone was not as it should be
      else follow(answer, now);
      break;
    }
  }
  if (role_ == Role::leading) write_next(now);
  return take();
}

void ReplicatedCoordinator::on_unknown(const StoreRequest& request, const std::string& why) {
  if (!failing_) failing_ = {.why = {}, .since = asked_at_};
  failing_->why = why;
  failing_->of_write |= request.kind != Kind::read;
  if (request.kind != Kind::read) write_failed_at_ = now_;
  if (!failing_->told && failing_said_.may_say(now_)) {
    note(true, "the store {}: {}", failing_->of_write ? "did not take what was to be written" : "did not answer", why);
    failing_->told = true;
  }
  if (request.kind != Kind::claim) return;
  const Duration silence = options_.job.silence;
  if (now_ - claim_again_ > kLinesApart * silence) claim_pause_ = {};  // what ailed the store then may be over
  claim_pause_ = std::clamp(2 * claim_pause_, silence / 16, silence);
  claim_again_ = now_ + claim_pause_;
}

void ReplicatedCoordinator::on_answered(const StoreRequest& request, const StoreAnswer& answer) {
  answered_ = asked_at_;
  // A member of the store's that lags behind says what was known already.
  const std::uint64_t newest = std::max(answer.leader_revision, answer.alive_revision);
  const bool by_others = newest > std::exchange(newest_revision_, std::max(newest, newest_revision_)) ||
                         (has_read_ && !answer.entries.empty() && answer.entries.back().first >= position_);
  const bool takes_writes = request.kind != Kind::read || by_others;
  if (request.kind != Kind::read) claim_pause_ = {}, claim_again_ = {};  // what the store takes of others tells nothing
  // Where there has been nothing to write for so long nobody knows.
  const bool long_ago = now_ - write_failed_at_ > kLinesApart * options_.job.silence;
  if (!failing_ || (failing_->of_write && !takes_writes && !long_ago)) return;
  if (failing_->told)
    note(false, "the store {} again, after {:.0f} ms", failing_->of_write ? "takes what is written" : "answers",
         milliseconds(now_ - failing_->since));
  failing_.reset();
}

// An answer as of before what is known. Where it was to be as of now, the store has lost what it had.
bool ReplicatedCoordinator::set_back(const StoreRequest& request, const StoreAnswer& answer, TimePoint now) {
  if (answer.leader_revision >= leader_revision_) return false;
  if (request.kind == Kind::read && !request.recent) {
    reads_recent_ = true;
    return true;
  }
  note(true, "the store was set back: what it had of this job is forgotten here, too");
  role_ = Role::following;
  newest_revision_ = 0;
  forget();
  learn_of_leader(answer.leader_revision, answer.leader, now);
  return true;
}

// It can be made another time, and no decision is worth less without it.
void ReplicatedCoordinator::on_compacted(const StoreRequest& request, const StoreAnswer& answer, TimePoint now) {
  tried_at_ = request.position;
  if (answer.outcome == Outcome::unknown) {
    if (snapshot_failed_.empty()) note(true, "the store did not take a snapshot: {}", answer.error);
    snapshot_failed_ = answer.error;
    return;
  }
  snapshot_failed_.clear();
  // Refused to the leader: the snapshot that is there stands for as much already, by an earlier try.
  if (answer.outcome == Outcome::done || leads_still(answer)) snapshot_at_ = request.position;
  else follow(answer, now);
}

}  // namespace rejoin::membership
