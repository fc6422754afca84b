#include "membership/ledger.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "control.pb.h"

namespace rejoin::membership {

namespace {

Batch from(const google::protobuf::RepeatedPtrField<proto::Range>& ranges) {
  Batch batch;
  for (const auto& range : ranges) batch.push_back({range.begin(), range.end()});
  return batch;
}

void put(const auto& ranges, google::protobuf::RepeatedPtrField<proto::Range>* to) {
  for (const auto& range : ranges) {
    auto& one = *to->Add();
    one.set_begin(range.begin);
    one.set_end(range.end);
  }
}

}  // namespace

Batch batch_of(const proto::Member& member) { return from(member.batch()); }

std::uint64_t samples_of(const Batch& batch) {
  std::uint64_t samples = 0;
  for (const auto& range : batch) samples += range.size();
  return samples;
}

void add(Samples& samples, const Batch& batch) {
  for (const auto& range : batch) samples.add(range.begin, range.end);
}

void Ledger::assign(const std::vector<ReplicaId>& contributors) {
  if (shares()) return share(contributors);
  for (auto replica : contributors)
    if (!held_.contains(replica)) held_[replica] = take(dealing_.batch);
}

void Ledger::share(const std::vector<ReplicaId>& contributors) {
  std::uint64_t held = 0;
  std::vector<ReplicaId> without;
  for (auto replica : contributors) {
    if (const Batch* batch = batch_of(replica)) held += samples_of(*batch);
    else without.push_back(replica);
  }
  if (without.empty()) return;
  const std::uint64_t together = units(contributors.size()) * dealing_.unit;
  const auto dealt = deal((together - std::min(held, together)) / dealing_.unit, without, balance_);
  for (std::size_t i = 0; i < without.size(); ++i) held_[without[i]] = take(dealt[i] * dealing_.unit);
}

Batch Ledger::take(std::uint64_t missing) {
  Batch batch;
  while (missing > 0 && !returned_.empty()) {
    SampleRange& front = returned_.front();
    const std::uint64_t step = std::min(missing, front.size());
    batch.push_back({front.begin, front.begin + step});
    front.begin += step;
    missing -= step;
    if (front.size() == 0) returned_.pop_front();
  }
  if (missing > 0) {
    batch.push_back({next_, next_ + missing});
    next_ += missing;
  }
  return batch;
}

void Ledger::hand_back(ReplicaId replica) {
  balance_.shares.erase(replica);
  if (next_balance_) next_balance_->shares.erase(replica);
  auto held = held_.extract(replica);
  if (held.empty()) return;
  for (const auto& range : held.mapped()) append(returned_, range);
  if (held_.empty()) forget_balance();
}

void Ledger::commit(Step step) {
  Samples of_step;
  for (const auto& [replica, batch] : held_) add(of_step, batch);
  trained_.add(of_step);
  steps_.insert_or_assign(step.value, of_step);  // a copy: without the room for ranges that have become one
  committed_ = step;
  held_.clear();
  if (next_balance_) balance_ = *std::exchange(next_balance_, std::nullopt);
  if (steps_.size() <= kStepsKept) return;
  from_ = Step(steps_.begin()->first);
  steps_.erase(steps_.begin());
}

void Ledger::roll_back(Step version) {
  auto trained = trained_at(version);
  REJOIN_CHECK(trained, "the ledger reaches from step {} to {}, and not to {}", from_, committed_, version);
  trained_ = std::move(*trained);
  steps_.erase(steps_.upper_bound(version.value), steps_.end());
  committed_ = version;
  held_.clear();
  forget_balance();
  hand_out_in_order();
}

void Ledger::go_on_from(Step version, const Samples& trained) {
  from_ = committed_ = version;
  trained_ = trained;
  steps_.clear();
  held_.clear();
  forget_balance();
  hand_out_in_order();
}

void Ledger::hand_out_in_order() {
  returned_.clear();
  next_ = 0;
  for (const auto& [begin, end] : trained_.ranges()) {
    if (begin > next_) returned_.push_back({next_, begin});
    next_ = end;
  }
}

std::optional<Samples> Ledger::trained_at(Step version) const {
  if (version < from_ || version > committed_) return std::nullopt;
  Samples later, trained = trained_;
  for (auto it = steps_.upper_bound(version.value); it != steps_.end(); ++it) later.add(it->second);
  trained.remove(later);
  return trained;
}

void Ledger::to(proto::LogRecord_Snapshot_Ledger& snapshot) const {
  snapshot.set_next(next_);
  snapshot.set_from(from_.value);
  put(returned_, snapshot.mutable_handed_back());
  trained_.to(snapshot.mutable_trained());
  for (const auto& [step, samples] : steps_) {
    auto& one = *snapshot.add_steps();
    one.set_step(step);
    samples.to(one.mutable_trained());
  }
  for (const auto& [replica, batch] : held_) {
    auto& one = *snapshot.add_held();
    one.set_replica(replica.value);
    put(batch, one.mutable_batch());
  }
  if (balance_.in_force()) balance_.to(*snapshot.mutable_balance());
  if (next_balance_) next_balance_->to(*snapshot.mutable_next_balance());
}

void Ledger::take_up(const proto::LogRecord_Snapshot_Ledger& snapshot, Step committed) {
  next_ = snapshot.next();
  from_ = Step(snapshot.from());
  committed_ = committed;
  returned_.clear(), steps_.clear(), held_.clear();
  for (const auto& range : rejoin::membership::from(snapshot.handed_back())) append(returned_, range);
  trained_ = Samples(snapshot.trained(), kMostSamples);
  for (const auto& one : snapshot.steps()) steps_[one.step()] = Samples(one.trained(), kMostSamples);
  for (const auto& one : snapshot.held()) held_[ReplicaId(one.replica())] = membership::batch_of(one);
  balance_ = Balance::from(snapshot.balance());
  next_balance_.reset();
  if (snapshot.has_next_balance()) next_balance_ = Balance::from(snapshot.next_balance());
}

void Ledger::to(proto::Plan_Ahead& ahead, const std::vector<ReplicaId>& given_up) const {
  constexpr std::size_t most = 32;  // ranges: there are few, as a rule
  auto goes_out = returned_;
  for (auto replica : given_up)
    if (const Batch* held = batch_of(replica))
      for (const auto& range : *held) append(goes_out, range);
  ahead.set_batch(dealing_.batch);
  ahead.set_together(dealing_.together);
  ahead.set_unit(dealing_.unit);
  ahead.set_next(next_);
  for (std::size_t i = 0; i < std::min(most, goes_out.size()); ++i) {
    auto& range = *ahead.add_handed_back();
    range.set_begin(goes_out[i].begin);
    range.set_end(goes_out[i].end);
  }
  ahead.set_more(goes_out.size() > most);
  if (next_balance().in_force()) next_balance().to(*ahead.mutable_balance());
}

Ledger Ledger::from(const proto::Plan_Ahead& ahead) {
  Ledger ledger(
      {.batch = ahead.batch(), .together = ahead.together(), .unit = std::max<std::uint64_t>(1, ahead.unit())});
  ledger.next_ = ahead.next();
  ledger.balance_ = Balance::from(ahead.balance());
  for (const auto& range : rejoin::membership::from(ahead.handed_back()))
    if (range.begin < range.end) ledger.returned_.push_back(range);
  return ledger;
}

const Batch* Ledger::batch_of(ReplicaId replica) const {
  auto found = held_.find(replica);
  return found == held_.end() ? nullptr : &found->second;
}

Audit audit(const std::map<std::uint64_t, Batch>& trained_by_step) {
  Batch all;
  for (const auto& [step, batch] : trained_by_step) all.insert(all.end(), batch.begin(), batch.end());
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Audit audit;
  std::uint64_t covered = 0;  // every sample below is counted
  for (const auto& range : all) {
    if (range.begin > covered) audit.lost += range.begin - covered;
    const std::uint64_t fresh_from = std::max(range.begin, covered);
    if (range.end > fresh_from) audit.once += range.end - fresh_from;
    if (fresh_from > range.begin) audit.repeated += std::min(range.end, fresh_from) - range.begin;
    covered = std::max(covered, range.end);
  }
  audit.once -= std::min(audit.once, audit.repeated);
  audit.samples = covered;
  return audit;
}

}  // namespace rejoin::membership
