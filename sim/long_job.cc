#include "sim/long_job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "base/fail.h"
#include "membership/coordinator.h"
#include "membership/log.h"
#include "sim/heap.h"

namespace rejoin::sim {

namespace {

using membership::Ledger;
using membership::Log;

constexpr std::uint64_t kBatch = 8, kStepsOut = 20;

std::uint64_t memory() {
  std::uint64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

class LongJob {
 public:
  LongJob(const LongJobOptions& options, Log log) : options_(options), log_(std::move(log)) {
    config_.replicas = options.replicas;
    config_.ranks = 1;
    config_.batch = kBatch;
    config_.id = 1;
    for (std::uint32_t r = 0; r < options.replicas; ++r) members_.push_back({ReplicaId(r), Incarnation(r + 1)});
    last_incarnation_ = options.replicas;
  }

  Result<> run(const std::function<void(const LongJobState&)>& report) {
    proto::LogRecord job;
    job.mutable_job()->set_replicas(config_.replicas);
    job.mutable_job()->set_ranks(config_.ranks);
    job.mutable_job()->set_batch(config_.batch);
    job.mutable_job()->set_id(config_.id);
    if (auto written = log_.append({job}); !written) return written;
    if (auto begun = begin_epoch("start"); !begun) return begun;
    std::uint64_t next_report = 1000;
    for (std::uint64_t step = 1; step <= options_.steps; ++step) {
      if (auto changed = lose_or_take_back(step); !changed) return changed;
      if (auto committed = commit(step); !committed) return committed;
      state_.log_bytes = std::max(state_.log_bytes, log_.size());
      if (log_.size() >= compact_at_)
        if (auto compacted = compact(); !compacted) return compacted;
      if (step != next_report && step != options_.steps) continue;
      if (auto recovered = recover(); !recovered) return tl::unexpected(recovered.error());
      state_.steps = step;
      state_.heap_bytes = heap_bytes();
      report(state_);
      state_ = {};
      next_report *= 10;
    }
    return {};
  }

 private:
  struct Member {
    ReplicaId replica;
    Incarnation incarnation;
  };

  void name(const Member& member, proto::Member& to) const {
    to.set_replica(member.replica.value);
    to.set_incarnation(member.incarnation.value);
  }

  Result<> begin_epoch(const std::string& reason) {
    proto::LogRecord record;
    auto& epoch = *record.mutable_epoch();
    epoch.set_epoch(++epoch_);
    epoch.set_step(committed_ + 1);
    epoch.set_reason(reason);
    std::vector<ReplicaId> contributors;
    for (const auto& member : members_) {
      name(member, *epoch.add_members());
      contributors.push_back(member.replica);
    }
    ledger_.assign(contributors);
    return log_.append({record});
  }

  // One at a time is out.
  Result<> lose_or_take_back(std::uint64_t step) {
    if (out_ && step >= out_until_) {
      proto::LogRecord incarnated;
      incarnated.mutable_incarnated()->set_incarnation(++last_incarnation_);
      if (auto written = log_.append({incarnated}); !written) return written;
      members_.push_back({*out_, Incarnation(last_incarnation_)});
      return begin_epoch(fmt::format("replica {} is back", *std::exchange(out_, std::nullopt)));
    }
    if (out_ || step % options_.steps_between_losses != 0 || members_.size() < 2) return {};
    const auto lost = members_.begin() + static_cast<std::ptrdiff_t>(step * 7919 % members_.size());
    out_ = lost->replica;
    out_until_ = step + kStepsOut;
    ledger_.hand_back(lost->replica);
    members_.erase(lost);
    return begin_epoch(fmt::format("without replica {}: its process is gone", *out_));
  }

  Result<> commit(std::uint64_t step) {
    auto& committed = *commit_.front().mutable_committed();
    committed.Clear();
    committed.set_step(step);
    committed.set_epoch(epoch_);
    std::vector<ReplicaId> contributors;
    for (const auto& member : members_) {
      auto& one = *committed.add_members();
      name(member, one);
      for (const auto& range : *ledger_.batch_of(member.replica)) {
        auto& samples = *one.add_batch();
        samples.set_begin(range.begin);
        samples.set_end(range.end);
      }
      contributors.push_back(member.replica);
    }
    ledger_.commit(Step(step));
    ledger_.assign(contributors);
    committed_ = step;
    return log_.append(commit_);
  }

  // As the next coordinator would: from the file.
  Result<proto::LogRecord> recover() {
    const auto began = std::chrono::steady_clock::now();
    auto parsed = membership::parse_one_file(options_.directory + "/decisions.log");
    if (!parsed) return tl::unexpected(parsed.error());
    membership::Coordinator coordinator(config_);
    if (auto recovered = coordinator.recover(parsed->records, SteadyClock().now()); !recovered)
      return tl::unexpected(recovered.error());
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    state_.recovery_ms = std::max(state_.recovery_ms, took.count());
    state_.memory_bytes = std::max(state_.memory_bytes, memory());
    if (coordinator.committed() != Step(committed_) || !(coordinator.ledger() == ledger_))
      return fail(ErrorCode::corrupt, "after step {} the log leads to another state", committed_);
    auto snapshot = coordinator.snapshot();
    state_.snapshot_bytes = std::max<std::uint64_t>(state_.snapshot_bytes, snapshot.ByteSizeLong());
    return snapshot;
  }

  Result<> compact() {
    auto snapshot = recover();
    if (!snapshot) return tl::unexpected(snapshot.error());
    if (auto compacted = log_.compact(*snapshot); !compacted) return compacted;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory))
      if (entry.path().filename() != "decisions.log") std::filesystem::remove(entry.path());
    compact_at_ = std::max(options_.log_compact, 2 * log_.size());
    return {};
  }

  const LongJobOptions options_;
  Log log_;
  membership::JobConfig config_;
  Ledger ledger_{kBatch};
  std::vector<Member> members_;
  std::optional<ReplicaId> out_;
  std::uint64_t out_until_ = 0, epoch_ = 0, committed_ = 0, last_incarnation_ = 0;
  std::uint64_t compact_at_ = options_.log_compact;
  std::vector<proto::LogRecord> commit_{1};  // made once: its members would take longer to allocate than to fill in
  LongJobState state_;
};

}  // namespace

Result<> run_long_job(const LongJobOptions& options, const std::function<void(const LongJobState&)>& report) {
  auto disk = membership::Disk::real();
  disk.sync = [](int) { return 0; };  // the disk's speed is not what this measures
  auto log = Log::open(options.directory, disk);
  if (!log) return tl::unexpected(log.error());
  if (!log->records().empty())
    return fail(ErrorCode::invalid_argument, "{} holds the log of a job; give an empty directory", options.directory);
  return LongJob(options, std::move(*log)).run(report);
}

}  // namespace rejoin::sim
