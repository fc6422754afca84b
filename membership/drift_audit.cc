#include "membership/drift_audit.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "base/fail.h"
#include "base/lower_median.h"
#include "base/text.h"

namespace rejoin::membership {

namespace {

constexpr std::uint64_t kFirstPeriod = 64;         // steps, before it is known how long they are
constexpr std::uint64_t kLongestPeriod = 1 << 16;  // … unless it is set
constexpr double kShare = 0.005;                   // of a step's time
constexpr std::size_t kRemembered = 16;            // steps
constexpr std::size_t kDigestTimes = 5;            // of a rank: one that was paused while it measured is outvoted
constexpr std::size_t kStrikes = 3;
constexpr int kStateRepeats = 3;         // of one step, while the states before it differ
constexpr std::uint64_t kInARow = 1000;  // steps that three differences may lie apart

// Bytes of what a peer says of its state: what differs is told in records of the log.
constexpr std::size_t kLongestName = 200, kLongestReport = 2000;

// The digest that more than half of them reported.
std::optional<std::uint64_t> majority(const std::map<std::uint32_t, std::uint64_t>& digests) {
  std::map<std::uint64_t, std::size_t> votes;
  for (const auto& [replica, digest] : digests)
    if (2 * ++votes[digest] > digests.size()) return digest;
  return std::nullopt;
}

bool differ(const std::map<std::uint32_t, std::uint64_t>& digests) {
  return std::any_of(digests.begin(), digests.end(),
                     [&](const auto& one) { return one.second != digests.begin()->second; });
}

// Digests by replica.
template <typename Digests>
std::string list(const Digests& digests) {
  std::string text;
  for (const auto& [replica, digest] : digests)
    text += fmt::format("{}{:016x} at replica {}", text.empty() ? "" : ", ", digest, replica);
  return text;
}

}  // namespace

DriftAudit::DriftAudit(const AuditConfig& config, std::uint32_t ranks)
    : config_(config), ranks_(ranks), period_(config.period != 0 ? config.period : kFirstPeriod) {}

void DriftAudit::note(std::string line) {
  counted_.last = line;
  notes_.push_back(std::move(line));
}

void DriftAudit::fill(proto::Plan& plan) const {
  if (!config_.on) return;
  plan.mutable_audit()->set_period(period_);
  plan.mutable_audit()->set_phase(phase_);
  if (!inspection_) return;
  plan.mutable_inspect()->set_epoch(inspection_->epoch.value);
  plan.mutable_inspect()->set_rank(inspection_->rank);
}

// ---- what comes in

void DriftAudit::on_digest_time(std::uint32_t rank, Duration time) {
  if (time == Duration{}) return;
  auto& times = digest_times_[rank];
  times.push_back(time);
  if (times.size() > kDigestTimes) times.pop_front();
  measured_anew_ = true;
}

// Of the rank that takes longest, since a step takes as long as its slowest rank.
Duration DriftAudit::digest_time() const {
  Duration longest{};
  for (const auto& [rank, times] : digest_times_)
    longest = std::max(longest, lower_median<Duration>({times.begin(), times.end()}));
  return longest;
}

std::optional<std::uint64_t> DriftAudit::fitting_period() const {
  if (config_.period != 0 || digest_times_.empty() || step_times_.size() < kRemembered) return std::nullopt;
  const double step = std::max(seconds(lower_median<Duration>({step_times_.begin(), step_times_.end()})), 1e-6);
  return static_cast<std::uint64_t>(
      std::clamp(std::ceil(seconds(digest_time()) / (kShare * step)), 1.0, static_cast<double>(kLongestPeriod)));
}

void DriftAudit::on_reduced(ReplicaId replica, const proto::Reduced& reduced) {
  if (config_.on) reported_[replica].take(reduced, ranks_);
}

void DriftAudit::on_details(const proto::Details& details) {
  if (!inspection_ || details.epoch() != inspection_->epoch.value || details.rank() != inspection_->rank ||
      !inspection_->digests.contains(details.replica()))
    return;
  inspection_->details[details.replica()] = details;
}

void DriftAudit::on_drift(const proto::Drift& drift) {
  ++counted_.drift_reports;
  if (!config_.on || focus_ || drift.total() == 0 || drift.offset() >= drift.total()) return;
  focus_ = {drift.offset(), drift.total()};
  std::vector<std::pair<std::uint32_t, std::uint64_t>> digests;
  for (int i = 0; i < std::min(drift.sources_size(), drift.digests_size()); ++i)
    digests.emplace_back(drift.sources(i), drift.digests(i));
  const auto line =
      fmt::format("the sources of replica {} rank {} differ at version {}: tensor '{}' elements {} to {}: {}",
                  drift.replica(), drift.rank(), drift.version(), shortened(drift.tensor(), kLongestName),
                  drift.first(), drift.first() + drift.count(), list(digests));
  note(shortened(line, kLongestReport));
}

void DriftAudit::on_committed(TimePoint now) {
  on_epoch();
  inspection_.reset();
  if (!config_.on) return;
  if (committed_at_ != TimePoint{}) step_times_.push_back(now - committed_at_);
  if (step_times_.size() > kRemembered) step_times_.pop_front();
  committed_at_ = now;
  if (const auto focus = std::exchange(focus_, std::nullopt)) {
    phase_ = static_cast<std::uint64_t>(static_cast<double>(focus->first) / static_cast<double>(focus->second) *
                                        static_cast<double>(period_));
    return;
  }
  // A round that is too long by far, since it was measured wrong, is not waited for.
  const auto fitting = measured_anew_ ? fitting_period() : std::nullopt;
  if (fitting) measured_anew_ = false;
  if (fitting && *fitting < period_ / 2) phase_ = phase_ * *fitting / std::exchange(period_, *fitting);
  if (++phase_ < period_) return;
  phase_ = 0;
  ++counted_.rounds;
  period_ = fitting_period().value_or(period_);
}

// ---- decisions

DriftAudit::Verdict DriftAudit::judge(std::span<const Voter> voters, Epoch epoch, Step committed) {
  if (!config_.on) return {};
  explain();
  if (auto verdict = struck_out(voters, committed)) return *verdict;
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    const RankDigests first = reported_[voters.front().replica].of(rank);
    const auto same = [&](const Voter& voter) { return reported_[voter.replica].of(rank) == first; };
    if (std::all_of(voters.begin(), voters.end(), same)) continue;  // but for joiners, which have no state to compare
    std::map<std::uint32_t, std::uint64_t> results, states;
    for (const auto& voter : voters) {
      const RankDigests digests = reported_[voter.replica].of(rank);
      results[voter.replica.value] = digests.reduced;
      if (voter.contributes) states[voter.replica.value] = digests.state;
    }
    if (differ(results)) {
      ++counted_.result_differences;
      return repeat({epoch, committed, rank, false, std::move(results), {}}, voters);
    }
    if (!states_reported_alike_ || !differ(states)) continue;
    const bool again = inspection_ && inspection_->of_state && inspection_->committed == committed;
    const int times = again ? inspection_->times + 1 : 1;
    const bool alike = again && inspection_->rank == rank && inspection_->digests == states;
    if (alike || times > kStateRepeats) {  // one that is another each time ends nothing by being so
      if (std::exchange(inspection_->rank, rank) != rank) inspection_->details.clear();
      inspection_->digests = std::move(states);
      const Verdict verdict = judge_state();
      inspection_.reset();  // those that are left are judged by what they differ in from now on
      return verdict;
    }
    ++counted_.state_differences;
    return repeat({epoch, committed, rank, true, std::move(states), {}, times}, voters);
  }
  veterans_.clear();
  for (const auto& voter : voters)
    if (voter.contributes) veterans_.push_back(voter.replica);
  return {};
}

DriftAudit::Verdict DriftAudit::repeat(Inspection inspection, std::span<const Voter> voters) {
  for (const auto& voter : voters) inspection.processes[voter.replica.value] = voter.incarnation;
  const std::string what =
      inspection.of_state
          ? fmt::format("the states of rank {} differ at version {}", inspection.rank, inspection.committed)
          : fmt::format("the results of rank {} differ in step {}", inspection.rank, inspection.committed.value + 1);
  note(fmt::format("{}: {}; the step is repeated", what, list(inspection.digests)));
  inspection_ = std::move(inspection);
  return {Verdict::Kind::repeat, {}, what};
}

// Who is to blame for results that differed, when the step has been reduced again and all have reported what was behind
// it.
void DriftAudit::explain() {
  if (!inspection_ || inspection_->of_state) return;
  const auto inspection = *std::exchange(inspection_, std::nullopt);
  Strike strike{.committed = inspection.committed, .blamed = {}};
  if (!explain_by_hop(inspection, strike)) {
    const auto right = majority(inspection.digests);
    for (const auto& [replica, digest] : inspection.digests)
      if (right && digest != *right) strike.blamed.push_back(inspection.processes.at(replica));
    note(fmt::format("the results of rank {} differed in step {}, over no hop that could be found: {}", inspection.rank,
                     inspection.committed.value + 1, list(inspection.digests)));
  }
  strikes_.push_back(std::move(strike));
  if (strikes_.size() > kStrikes) strikes_.pop_front();
}

// The first bytes that one has otherwise than the one it got them from.
bool DriftAudit::explain_by_hop(const Inspection& inspection, Strike& strike) {
  for (const auto& [replica, details] : inspection.details)
    for (int b = 0; b < details.buckets_size(); ++b)
      for (int s = 0; s < details.buckets(b).segments_size(); ++s) {
        const auto& ours = details.buckets(b).segments(s);
        const auto sender = inspection.details.find(ours.from());
        if (ours.from() == replica || sender == inspection.details.end() || b >= sender->second.buckets_size() ||
            details.buckets(b).segments_size() != sender->second.buckets(b).segments_size())
          continue;
        const auto theirs = sender->second.buckets(b).segments(s).digest();
        if (theirs == ours.digest()) continue;
        strike.blamed = {inspection.processes.at(replica), inspection.processes.at(ours.from())};
        note(fmt::format(
            "step {}: bucket {} of rank {} differs at replica {} from what replica {} has sent it (segment {}: "
            "{:016x}, {:016x})",
            inspection.committed.value + 1, b, inspection.rank, replica, ours.from(), s, ours.digest(), theirs));
        return true;
      }
  return false;
}

std::optional<DriftAudit::Verdict> DriftAudit::struck_out(std::span<const Voter> voters, Step committed) {
  if (strikes_.size() < kStrikes || strikes_.front().committed.value + kInARow < committed.value) return std::nullopt;
  // Who has the state of the last commit must not be the last one that has contributed to it.
  const auto others = [&](ReplicaId replica) {
    return std::any_of(voters.begin(), voters.end(), [&](const Voter& v) {
      return v.contributes && v.replica != replica &&
             std::find(veterans_.begin(), veterans_.end(), v.replica) != veterans_.end();
    });
  };
  // A strike is a hop's: where one of its two processes is gone, the other is not to bear it alone.
  std::erase_if(strikes_, [&](const Strike& strike) {
    return !std::ranges::all_of(strike.blamed, [&](Incarnation process) {
      return std::ranges::any_of(voters, [&](const Voter& voter) { return voter.incarnation == process; });
    });
  });
  if (strikes_.size() < kStrikes) return std::nullopt;
  const auto every_time = [&](Incarnation process) {
    return std::all_of(strikes_.begin(), strikes_.end(), [&](const Strike& strike) {
      return std::find(strike.blamed.begin(), strike.blamed.end(), process) != strike.blamed.end();
    });
  };
  for (const bool joiners : {true, false})
    for (const auto process : strikes_.back().blamed)
      for (const auto& voter : voters) {
        if (voter.incarnation != process || voter.contributes == joiners || (!joiners && !others(voter.replica)) ||
            !every_time(process))
          continue;
        const auto right = has_the_right_state(voter, voters);
        if (!right) continue;  // nobody can tell, which the states' own comparison says
        const auto kind = *right ? Verdict::Kind::suspend : Verdict::Kind::remove;
        const std::string steps = struck_steps();
        strikes_.clear();
        return Verdict{kind, voter.replica,
                       fmt::format("its results differed {}, the last time: {}", steps, counted_.last)};
      }
  const bool unexplained =
      std::all_of(strikes_.begin(), strikes_.end(), [](const Strike& strike) { return strike.blamed.empty(); });
  if (!unexplained) return std::nullopt;
  const std::string steps = struck_steps();
  strikes_.clear();
  std::vector<ReplicaId> all;
  for (const auto& voter : voters) all.push_back(voter.replica);
  return Verdict{
      Verdict::Kind::stop,
      {},
      fmt::format(
          "results differed {}, and nobody can tell which replica is wrong ({}). Look "
          "for bad memory or a bad link, end one replica, and start the coordinator, or all of several, again with "
          "--drop-replica REPLICA@{}",
          steps, counted_.last, committed),
      std::move(all)};
}

// By what has been reported in this epoch. A joiner's is the coordinator's to judge.
std::optional<bool> DriftAudit::has_the_right_state(const Voter& voter, std::span<const Voter> voters) {
  for (std::uint32_t rank = 0; rank < ranks_ && voter.contributes && states_reported_alike_; ++rank) {
    std::map<std::uint32_t, std::uint64_t> states;
    for (const auto& one : voters)
      if (one.contributes) states[one.replica.value] = reported_[one.replica].of(rank).state;
    const auto right = majority(states);
    if (!right) return std::nullopt;
    if (*right != states.at(voter.replica.value)) return false;
  }
  return true;
}

std::string DriftAudit::struck_steps() const {
  std::set<std::uint64_t> steps;
  for (const auto& strike : strikes_) steps.insert(strike.committed.value + 1);
  return fmt::format("{} times, in step{} {}", strikes_.size(), steps.size() > 1 ? "s" : "", fmt::join(steps, ", "));
}

// Where the state differs first, by the details that both have reported.
std::string DriftAudit::place_of(std::uint32_t right, std::uint32_t wrong) const {
  const auto a = inspection_->details.find(right), b = inspection_->details.find(wrong);
  if (a != inspection_->details.end() && b != inspection_->details.end())
    for (int i = 0; i < std::min(a->second.state_size(), b->second.state_size()); ++i) {
      const auto &ours = a->second.state(i), &theirs = b->second.state(i);
      if (ours.digest() == theirs.digest()) continue;
      return fmt::format("tensor '{}' elements {} to {} of rank {}: {:016x} at replica {}, {:016x} at replica {}",
                         shortened(ours.tensor(), kLongestName), ours.first(), ours.first() + ours.count(),
                         inspection_->rank, ours.digest(), right, theirs.digest(), wrong);
    }
  return fmt::format("part {} of {} of the state of rank {}: {:016x} at replica {}, {:016x} at replica {}", phase_ + 1,
                     period_, inspection_->rank, inspection_->digests.at(right), right, inspection_->digests.at(wrong),
                     wrong);
}

DriftAudit::Verdict DriftAudit::judge_state() const {
  const auto& digests = inspection_->digests;
  const auto right = majority(digests);
  const auto with = [&](bool agreeing) {
    const std::uint64_t digest = right.value_or(digests.begin()->second);
    return std::find_if(digests.begin(), digests.end(),
                        [&](const auto& one) { return (one.second == digest) == agreeing; })
        ->first;
  };
  const std::string where = fmt::format("at version {} {}", inspection_->committed, place_of(with(true), with(false)));
  if (right)
    return {Verdict::Kind::remove, ReplicaId(with(false)),
            fmt::format("its state differs from that of most replicas {}", where)};
  std::string choices;
  std::vector<ReplicaId> among;
  for (const auto& [replica, digest] : digests) {
    choices += fmt::format("{}--drop-replica {}@{}", choices.empty() ? "" : " or ", replica, inspection_->committed);
    among.push_back(ReplicaId(replica));
  }
  return {Verdict::Kind::stop,
          {},
          fmt::format("the replicas' states differ {}; nobody can tell which of them is right. Start the coordinator, "
                      "or all of several, again with {} to go on without the one that is wrong",
                      where, choices),
          std::move(among)};
}

}  // namespace rejoin::membership
