#include "sim/checker.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/digest.h"
#include "membership/log.h"

namespace rejoin::sim {

void Checker::violate(const std::string& invariant, std::string what) {
  if (!violation_ && invariant != ignore_) violation_ = {invariant, std::move(what)};
}

// The first word of a new log that matters: from which checkpoint the job goes on, or that it starts afresh.
void Checker::begin_again(const proto::LogRecord& record) {
  if (!log_lost_ || !(record.has_rolled_back() || record.has_epoch())) return;
  log_lost_ = false;
  if (record.has_rolled_back()) return;  // as any other that goes back
  proto::LogRecord afresh;
  afresh.mutable_rolled_back();
  on_record(afresh);
}

void Checker::on_record(const proto::LogRecord& record) {
  begin_again(record);
  if (replay_) replay_->on_record(record);
  check_lost();
  if (record.has_epoch()) {
    if (record.epoch().epoch() <= epoch_)
      violate("one-decision", fmt::format("epoch {} was begun after epoch {}", record.epoch().epoch(), epoch_));
    epoch_ = record.epoch().epoch();
    begin_step_anew(record.epoch());
  }
  if (record.has_committed()) {
    const std::uint64_t step = record.committed().step();
    std::map<std::uint32_t, membership::Batch> batches;
    for (const auto& member : record.committed().members())
      for (const auto& range : member.batch()) batches[member.replica()].push_back({range.begin(), range.end()});
    if (!decided_.emplace(step, std::move(batches)).second)
      violate("one-decision", fmt::format("step {} was committed twice", step));
  }
  if (record.has_rolled_back()) {
    const std::uint64_t version = record.rolled_back().version();
    // A checkpoint of what the log has lost, where that has committed nothing.
    if (decided_.empty()) decided_.insert(earlier_.begin(), earlier_.upper_bound(version));
    if (!record.rolled_back().trained().empty()) {
      membership::Samples trained;
      for (auto step = decided_.begin(); step != decided_.upper_bound(version); ++step)
        for (const auto& [replica, batch] : step->second)
          for (const auto& range : batch) trained.add(range.begin, range.end);
      if (trained != membership::Samples(record.rolled_back().trained(), membership::kMostSamples))
        violate("exactly-once", fmt::format("the job goes on after step {} with other samples trained than were: {}",
                                            version, trained.text()));
    }
    decided_.erase(decided_.upper_bound(version), decided_.end());
    leads_.erase(leads_.upper_bound(version), leads_.end());
    std::erase_if(reduced_, [&](const auto& entry) { return entry.first.second > version; });
    std::erase_if(states_, [&](const auto& entry) { return entry.first.second > version; });
  }
}

void Checker::go_on_from(const Checker& before, const std::vector<proto::LogRecord>& log) {
  if (!before.replay_) replay_.reset();
  else if (replay_) replay_->know_codings_of(*before.replay_);
  wrong_ = before.wrong_;
  earlier_ = before.decided_;
  earlier_.insert(before.earlier_.begin(), before.earlier_.end());
  for (const auto& record : log) on_record(record);
}

// Where nobody is left who was told, another one may lead the step. Who is out, and was not told yet, may still be.
void Checker::begin_step_anew(const proto::LogRecord::EpochBegun& epoch) {
  std::set<std::uint64_t> in;
  for (const auto& one : epoch.members()) in.insert(one.incarnation());
  for (const auto& one : epoch.suspended()) in.insert(one.incarnation());
  const auto is_in = [&](const auto& told) { return in.contains(told.first); };
  auto& [told, leader, those] = leads_[epoch.step()];
  if (std::ranges::none_of(told, is_in)) {
    told.clear();
    if (!epoch.has_leader() || leader != epoch.leader()) those.reset();
  }
  leader = epoch.has_leader() ? std::optional(epoch.leader()) : std::nullopt;
  if (those) those->merge(in);
  else those = std::move(in);
}

void Checker::check_lost() {
  if (replay_ && replay_->lost()) violate("bounded-error", *replay_->lost());
}

void Checker::on_told_who_leads(std::uint32_t replica, std::uint32_t rank, Incarnation incarnation, std::uint64_t step,
                                bool leads) {
  auto& [told, leader, those] = leads_[step];
  if (those && !those->contains(incarnation.value)) return;
  const auto [known, first] = told.emplace(incarnation.value, leads);
  if (!first && known->second != leads)
    violate("one-leader", fmt::format("replica {} rank {} {} step {}, and another rank of it was told otherwise",
                                      replica, rank, leads ? "leads" : "does not lead", step));
  if (!leads) return;
  for (const auto& [other, its] : told)
    if (its && other != incarnation.value)
      violate("one-leader", fmt::format("replica {} (incarnation {}) leads step {}, and so does incarnation {}",
                                        replica, incarnation.value, step, other));
}

void Checker::on_reduced(std::uint32_t replica, std::uint32_t rank, std::uint64_t step,
                         const std::vector<ftar::BucketSpec>& buckets) {
  std::uint64_t digest = 0;
  std::vector<BytesView> results;
  for (const auto& bucket : buckets) {
    results.push_back(bucket.output);
    digest = combine_digests(digest, rejoin::digest(bucket.output));
  }
  if (!decided_.contains(step))
    violate("one-decision",
            fmt::format("replica {} rank {} applies step {}, which nobody decided", replica, rank, step));
  const auto [known, first] = reduced_.emplace(RankAt{rank, step}, digest);
  if (!first && known->second != digest)
    violate("one-decision",
            fmt::format("replica {} rank {} applies another gradient of step {} than its peers", replica, rank, step));
  if (replay_) replay_->on_result(rank, step, results);
  check_lost();
}

void Checker::on_trained(std::uint32_t replica, std::uint32_t rank, std::uint64_t step, const membership::Batch& batch,
                         std::uint64_t before, std::uint64_t after) {
  if (before != after)
    violate("input-intact",
            fmt::format("the gradients of replica {} rank {} changed during step {}", replica, rank, step));
  const auto decided = decided_.find(step);
  if (decided == decided_.end()) return;  // on_reduced says so
  const auto counted = decided->second.find(replica);
  if (counted == decided->second.end() || counted->second != batch)
    violate("exactly-once", fmt::format("step {} was decided with other samples for replica {} than rank {} trained",
                                        step, replica, rank));
}

void Checker::on_state(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t version,
                       std::uint64_t digest) {
  if (auto known = wrong_.find(instance); known != wrong_.end()) {
    const Suspect suspect{replica, instance, digest};
    if (states_.contains({rank, version})) on_wrong_state({rank, version}, suspect);
    else if (version > known->second) suspects_[{rank, version}] = suspect;
    return;  // nobody is to be compared with it, and whoever caught up from it differs from the others
  }
  const auto [known, first] = states_.emplace(RankAt{rank, version}, digest);
  if (const auto suspect = suspects_.extract({rank, version})) on_wrong_state({rank, version}, suspect.mapped());
  if (!first && known->second != digest)
    violate("same-bits",
            fmt::format("replica {} rank {} differs from its peers at version {}", replica, rank, version));
  const auto right = replay_ ? replay_->digest(rank, version) : std::nullopt;
  if (right && *right != digest)
    violate("same-bits", fmt::format("replica {} rank {} differs at version {} from one process that trained the same",
                                     replica, rank, version));
}

// A bit that flipped may be rounded away by later updates: then it is right again.
void Checker::on_wrong_state(const RankAt& at, const Suspect& suspect) {
  auto known = wrong_.find(suspect.instance);
  if (known == wrong_.end()) return;
  if (suspect.digest == states_.at(at)) wrong_.erase(known);
  else if (at.second > known->second)
    violate("no-drift", fmt::format("replica {} rank {} has another state than its peers, and still contributes at "
                                    "version {}",
                                    suspect.replica, at.first, at.second));
}

void Checker::on_gradient_log(std::uint32_t replica, std::uint32_t rank, std::uint64_t bytes, std::uint64_t budget) {
  if (bytes > budget)
    violate("bounded-memory", fmt::format("replica {} rank {} keeps {} bytes of gradients, over its budget of {}",
                                          replica, rank, bytes, budget));
}

void Checker::on_stale_write() { violate("no-stale-write", "a write landed through an endpoint that was closed"); }

void Checker::on_end(const std::vector<proto::LogRecord>& log, const membership::Ledger& ledger) {
  auto trained = membership::trained_by_step(log);
  // What is handed out now is not lost: it is under way.
  for (const auto& [replica, batch] : ledger.held())
    for (const auto& range : batch) trained[~std::uint64_t{0}].push_back(range);
  const membership::Audit result = membership::audit(trained);
  if (result.repeated != 0) violate("exactly-once", fmt::format("{} samples were trained again", result.repeated));
  std::uint64_t waiting = 0;
  for (const auto& range : ledger.handed_back())
    if (range.begin < result.samples) waiting += std::min(range.end, result.samples) - range.begin;
  if (result.lost != waiting)
    violate("exactly-once", fmt::format("{} samples are lost, {} wait to be handed out", result.lost, waiting));
}

}  // namespace rejoin::sim
