// What a leader writes into the store, and what leaves it then.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/fail.h"
#include "membership/replicated_coordinator.h"

namespace rejoin::membership {

using Kind = StoreRequest::Kind;

namespace {

// While the store does not answer.
constexpr std::size_t kMostDecided = 1 << 16, kMostDecidedBytes = 256 * MiB;

std::size_t weight_of(const membership::Actions& decided) {
  std::size_t bytes = 0;
  for (const auto& record : decided.append) bytes += record.ByteSizeLong();
  for (const auto& [to, message] : decided.send) bytes += message.ByteSizeLong();
  return bytes;
}

}  // namespace

void ReplicatedCoordinator::lead(TimePoint now) {
  gave_up_ = false;
  look_at_versions();
  if (auto taken = machine_->take_over(now); !taken) {
    const bool of_settings = taken.error().code == ErrorCode::mismatch;  // another time they would not fit either
    return fail_with(of_settings ? ErrorCode::invalid_argument : taken.error().code, taken.error().message);
  }
  role_ = Role::leading;
  ++takeovers_;
  confirmed_at_ = heard_at_ = now;
  note(false, "leads in term {}, after step {}", leader_.term(), machine_->committed());
  if (const auto before = std::exchange(steps_led_, std::nullopt); before && *before != options_.job.steps)
    note(true, "the job has --steps {} from here on; the coordinator that led before had --steps {}",
         options_.job.steps, *before);
  membership::Actions first = machine_->on_tick(now);
  proto::LogRecord led;
  led.mutable_led()->set_term(leader_.term());
  led.mutable_led()->set_name(options_.name);
  led.mutable_led()->set_address(options_.address);
  first.append.insert(position_ == 0 ? first.append.end() : first.append.begin(), std::move(led));
  enqueue(std::move(first));
  for (const auto& [node, of] : nodes_)
    if (of.hello && role_ == Role::leading) enqueue(machine_->on_message(node, *of.hello, now));
  tell_who_leads(all_nodes());
  write_next(now);
}

// Others have taken over.
void ReplicatedCoordinator::follow(const StoreAnswer& answer, TimePoint now) {
  if (role_ == Role::leading)
    note(true, "no longer leads: what it decided since it last could write has reached nobody, and is forgotten");
  role_ = Role::following;
  forget();
  learn_of_leader(answer.leader_revision, answer.leader, now);
  // Also where the leader is this very claim still: whoever hears that it leads again has to introduce itself again.
  tell_who_leads(all_nodes());
}

// What is decided waits for the store, and would do so without bound. Nobody has heard of it: it is as if this process
// had ended, and another one come in its place.
void ReplicatedCoordinator::give_up_the_lead() {
  note(true,
       "no longer leads: {} decisions, {} of records and messages, wait for a store that does not answer; they have "
       "reached nobody, and are forgotten",
       queue_.size(), human_bytes(queued_bytes_));
  role_ = Role::following;
  forget();
  gave_up_ = true;
  tell_who_leads(all_nodes());
}

void ReplicatedCoordinator::enqueue(membership::Actions decided) {
  auto of_life = std::stable_partition(decided.send.begin(), decided.send.end(),
                                       [](const auto& one) { return !one.second.has_heartbeat(); });
  std::move(of_life, decided.send.end(), std::back_inserter(actions_.send));
  decided.send.erase(of_life, decided.send.end());
  if (decided.append.empty() && decided.send.empty() && decided.close.empty()) {
    std::move(decided.notes.begin(), decided.notes.end(), std::back_inserter(actions_.notes));
    return;
  }
  const std::size_t bytes = weight_of(decided);
  queued_bytes_ += bytes;
  closing_.insert(decided.close.begin(), decided.close.end());  // the machine knows them no more
  queue_.push_back({std::move(decided), bytes});
  bound_queue();
}

// Of a store that answers the next write takes what waits. One that does not may keep its request for long: what is
// decided until then counts, too.
void ReplicatedCoordinator::bound_queue() {
  const bool answers = !failing_ && !stalled_;
  if (role_ != Role::leading || answers) return;
  if (queue_.size() > kMostDecided || queued_bytes_ > kMostDecidedBytes) give_up_the_lead();
}

std::optional<proto::LogRecord> ReplicatedCoordinator::snapshot() const {
  const bool as_written = role_ == Role::leading ? queue_.empty() : has_read_;
  if (!as_written || position_ == 0 || position_ != copied_) return std::nullopt;
  auto record = machine_->snapshot();
  record.mutable_snapshot()->set_position(position_);
  return record;
}

// What has been decided meanwhile, together; or where there is nothing, now and then a sign of life.
void ReplicatedCoordinator::write_next(TimePoint now) {
  if (role_ != Role::leading || under_way_ || again_) return;
  if (due_) {
    const std::uint64_t position = due_->snapshot().position();
    submit({.kind = Kind::compact,
            .token = token_,
            .position = position,
            .leader = leader_bytes_,
            .value = std::exchange(due_, std::nullopt)->SerializeAsString()},
           now);
    return;
  }
  const Duration silence = options_.job.silence;
  // Of a leader that no node reaches the store is to show no sign, so that another one may take over.
  const bool sign_due =
      now - confirmed_at_ >= deadlines::kLeaderSign.of(silence) && now - heard_at_ <= deadlines::kAbandoned.of(silence);
  if (queue_.empty() && !suspects_itself_ && !sign_due) return;
  suspects_itself_ = false;
  proto::LogEntry entry;
  std::size_t bytes = 0;
  for (confirming_ = 0; confirming_ < queue_.size(); ++confirming_) {
    const auto& records = queue_[confirming_].actions.append;
    for (const auto& record : records) bytes += record.ByteSizeLong();
    if (confirming_ > 0 && bytes > options_.entry_bytes) break;
    for (const auto& record : records) *entry.add_records() = record;
  }
  appending_ = static_cast<std::uint64_t>(entry.records_size());
  if (appending_ == 0)
    return submit({.kind = Kind::renew, .token = token_, .leader = leader_bytes_, .value = {}, .behind = behind()},
                  now);
  // The decisions are as far as this entry now, and never again.
  if (const std::uint64_t end = position_ + appending_;
      confirming_ == queue_.size() && end - std::max(snapshot_at_, tried_at_) >= options_.per_snapshot) {
    due_ = machine_->snapshot();
    due_->mutable_snapshot()->set_position(end);
  }
  submit({.kind = Kind::append,
          .token = token_,
          .position = position_,
          .leader = leader_bytes_,
          .value = entry.SerializeAsString(),
          .behind = behind()},
         now);
}

// The last entry is never deleted: a snapshot deletes what the one before it stands for.
StoreRequest::Behind ReplicatedCoordinator::behind() const {
  if (last_entry_ < position_) return {.entry = last_entry_};
  return {.entry = {}, .snapshot_revision = snapshot_revision_};
}

void ReplicatedCoordinator::on_written(TimePoint now) {
  confirmed_at_ = sign_at_ = now;
  latency_.add(now - begun_at_);
  if (appending_ > 0) last_entry_ = position_;
  const bool begins = position_ == 0 && appending_ > 0;
  position_ += appending_;
  appending_ = 0;
  if (begins) {  // the job: another one could have become of it until now
    job_ = own_job_ = machine_->job();
    tell_who_leads(all_nodes());
  }
  release(std::exchange(confirming_, 0));
  look_at_stall(now);
  if (!outranked()) return;
  // The store was set back, or else nodes could not know a higher term: they hear only who leads in one as high.
  role_ = Role::following;
  forget();
  tell_who_leads(all_nodes());
}

// The store lacks what this one wrote last. All that is decided goes there now, at once and in one: a snapshot, with
// those records that were not written yet in an entry, for who has read as far. Where they are too many for that, it
// has the last one alone: so there is an entry for what comes to be behind.
void ReplicatedCoordinator::on_set_back(TimePoint now) {
  ++times_set_back_;
  set_back_ =
      "the store lacks what this leader wrote there last: its data was set back to an older copy. What is decided is "
      "put there as a snapshot; until that is done nothing else is written, and no other coordinator can go on";
  if (set_back_said_.may_say(now)) {
    note(true, "{}", set_back_);
    set_back_told_ = true;
  }
  due_.reset();
  if (stalled_) tell_who_leads(all_nodes());
  membership::Actions mark;
  auto& led = *mark.append.emplace_back().mutable_led();
  led.set_term(leader_.term());
  led.set_name(options_.name);
  led.set_address(options_.address);
  enqueue(std::move(mark));
  if (role_ != Role::leading) return;  // it has given up
  proto::LogEntry entry;
  for (const auto& decided : queue_)
    for (const auto& record : decided.actions.append) *entry.add_records() = record;
  confirming_ = queue_.size();
  appending_ = static_cast<std::uint64_t>(entry.records_size());
  const std::uint64_t end = position_ + appending_;
  if (entry.ByteSizeLong() > options_.entry_bytes) {
    const proto::LogRecord last = *entry.records().rbegin();
    entry.Clear();
    *entry.add_records() = last;
  }
  auto snapshot = machine_->snapshot();
  snapshot.mutable_snapshot()->set_position(end);
  submit({.kind = Kind::compact,
          .token = token_,
          .position = end,
          .leader = leader_bytes_,
          .value = snapshot.SerializeAsString(),
          .entry = entry.SerializeAsString(),
          .entry_at = end - static_cast<std::uint64_t>(entry.records_size())},
         now);
}

void ReplicatedCoordinator::on_mended(const StoreRequest& request, const StoreAnswer& answer, TimePoint now) {
  if (answer.outcome == StoreAnswer::Outcome::unknown) {
    on_unknown(request, answer.error);
    again_ = request;
    return bound_queue();
  }
  on_answered(request, answer);
  // Refused to the leader: an earlier try has been done.
  if (answer.outcome != StoreAnswer::Outcome::done && !leads_still(answer)) return follow(answer, now);
  if (std::exchange(set_back_told_, false))
    note(false, "the store has again what its {} decisions lead to, as a snapshot", request.position);
  set_back_.clear();
  snapshot_failed_.clear();
  snapshot_at_ = request.position;
  on_written(now);
  if (role_ == Role::leading) last_entry_ = request.entry_at;
}

void ReplicatedCoordinator::release(std::size_t items) {
  for (; items > 0; --items) {
    membership::Actions done = std::move(queue_.front().actions);
    queued_bytes_ -= queue_.front().bytes;
    queue_.pop_front();
    for (auto& record : done.append) {
      ++copied_;
      actions_.copy.push_back(std::move(record));
    }
    std::move(done.send.begin(), done.send.end(), std::back_inserter(actions_.send));
    for (auto node : done.close) {
      nodes_.erase(node);
      closing_.erase(node);
      actions_.close.push_back(node);
    }
    std::move(done.notes.begin(), done.notes.end(), std::back_inserter(actions_.notes));
  }
}

Duration ReplicatedCoordinator::patience() const {
  const Duration silence = options_.job.silence;
  return std::clamp(3 * took_, deadlines::kTakeover.of(silence), silence);
}

void ReplicatedCoordinator::look_at_stall(TimePoint now) {
  // A snapshot is no decision, and takes several transactions; but one that mends a store has all that is decided.
  const bool waits = again_ || (under_way_ && (under_way_->kind != Kind::compact || !under_way_->entry.empty()));
  const Duration waited = waits ? now - begun_at_ : Duration{};
  const bool stalled = waited > patience();
  if (std::exchange(stalled_, stalled) != stalled) tell_who_leads(all_nodes());
  if (stalled && !stall_logged_ && stall_said_.may_say(now)) {
    note(true, "the store does not take what is decided: nothing is decided until it does, and nobody is put out");
    stall_logged_ = true;
  }
  if (!stalled && std::exchange(stall_logged_, false)) note(false, "the store takes what is decided again");
  if (!stalled) waits_reported_ = false;
  if (waited <= options_.job.silence || waits_reported_) return;
  waits_reported_ = true;
  auto& [nodes, message] = actions_.send.emplace_back();
  nodes = all_nodes();
  message.mutable_waits()->set_stands(true);
  message.mutable_waits()->set_why(fmt::format("the coordinators' store, which has not answered for {:.0f} ms{}{}",
                                               milliseconds(waited), failing_ ? ": " : "",
                                               failing_ ? failing_->why : ""));
}

}  // namespace rejoin::membership
