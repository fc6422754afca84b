#include "daemon/log_transfer.h"

#include <fcntl.h>
#include <unistd.h>

#include <asio.hpp>
#include <chrono>

#include "base/fail.h"
#include "base/fd.h"
#include "membership/coordinator.h"
#include "membership/log.h"

namespace rejoin::daemon {

using membership::StoreAnswer;
using membership::StoreRequest;
using Kind = StoreRequest::Kind;
using Outcome = StoreAnswer::Outcome;

namespace {

constexpr std::uint64_t kTermsAhead = 1000;  // of those in the log: there may have been some that it does not have

struct WholeLog {
  std::vector<proto::LogRecord> records;
  Transferred about;
};

Result<WholeLog> read_whole(const std::string& path) {
  WholeLog whole;
  const auto read =
      membership::for_each_record(path, [&](const proto::LogRecord& record) { whole.records.push_back(record); });
  if (!read) return tl::unexpected(read.error());
  if (whole.records.empty()) return fail(ErrorCode::not_found, "{} holds no decision", path);
  const auto& first = whole.records.front();
  whole.about.records = whole.records.size();
  whole.about.torn = read->torn;
  whole.about.job = membership::job_of(first).id();
  whole.about.begins_after = first.snapshot().committed();
  for (const auto& record : whole.records) {
    if (record.has_snapshot()) whole.about.committed = Step(record.snapshot().committed());
    if (record.has_committed()) whole.about.committed = Step(record.committed().step());
    if (record.has_rolled_back()) whole.about.committed = Step(record.rolled_back().version());
  }
  return whole;
}

// The state that all records lead to, which stands for them in the store.
Result<proto::LogRecord> snapshot_of(const WholeLog& whole, const std::string& path) {
  const auto& first = whole.records.front();
  const auto& job = membership::job_of(first);
  membership::Coordinator machine({.replicas = job.replicas(),
                                   .ranks = job.ranks(),
                                   .batch = job.batch(),
                                   .constant_batch = job.constant_batch(),
                                   .links = membership::rule_in(job)});
  for (const auto& record : whole.records)
    if (auto replayed = machine.replay(record); !replayed)
      return fail(replayed.error().code, "{}: {}", path, replayed.error().message);
  proto::LogRecord snapshot = machine.snapshot();
  // A snapshot that a single coordinator has made says of how many records: any number does, for a new store.
  snapshot.mutable_snapshot()->set_position(membership::records_of_job(whole.records));
  return snapshot;
}

// The store's answer. A request whose answer is lost is repeated as it is, but not for ever.
Result<StoreAnswer> ask(asio::io_context& io, membership::Store& store, const StoreRequest& request,
                        const std::string& where) {
  constexpr int most = 20;
  std::string why;
  for (int tries = 0; tries < most; ++tries) {
    std::optional<StoreAnswer> answer;
    store.submit(request, [&](StoreAnswer got) { answer = std::move(got); });
    io.restart();
    while (!answer && io.run_one() > 0) {
    }
    if (answer && answer->outcome != Outcome::unknown) return *std::move(answer);
    if (answer) why = answer->error;
  }
  return fail(ErrorCode::unavailable,
              "{} does not answer: {}. Nothing, or a part, was written: see to it, and do this "
              "again with --replace",
              where, why);
}

// How far the store's log reaches, and who leads. Nothing: it has nothing of this job.
struct Present {
  std::uint64_t end = 0, leader_revision = 0, snapshot_position = 0;
  std::string snapshot, leader_bytes;
  proto::Leader leader;
  bool anything = false;
};
Result<Present> look(asio::io_context& io, membership::Store& store, const std::string& where) {
  Present present;
  while (true) {
    auto answer = ask(io, store, {.kind = Kind::read, .position = present.end, .value = {}}, where);
    if (!answer) return tl::unexpected(answer.error());
    present.leader_revision = answer->leader_revision;
    present.leader_bytes = answer->leader;
    present.anything |= answer->leader_revision != 0 || answer->snapshot_position != 0 || !answer->entries.empty();
    if (!answer->leader.empty() && !present.leader.ParseFromString(answer->leader))
      return fail(ErrorCode::corrupt, "{} holds something else than this version writes", where);
    present.snapshot_position = answer->snapshot_position;
    if (!answer->snapshot.empty()) {
      present.end = answer->snapshot_position;
      present.snapshot = answer->snapshot;
    }
    for (const auto& [position, bytes] : answer->entries) {
      proto::LogEntry entry;
      if (!entry.ParseFromString(bytes)) return fail(ErrorCode::corrupt, "{} is damaged at record {}", where, position);
      present.end = position + static_cast<std::uint64_t>(entry.records_size());
    }
    if (!answer->more) return present;
  }
}

}  // namespace

Result<Transferred> export_log(const std::string& log, const std::string& out) {
  auto whole = read_whole(log);
  if (!whole) return tl::unexpected(whole.error());
  const Fd file(::open(out.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) return fail_errno(out);
  Bytes bytes = membership::log_bytes(whole->records, 0);
  const Bytes mark = membership::log_bytes({}, bytes.size());
  bytes.insert(bytes.end(), mark.begin(), mark.end());
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = ::write(file.get(), bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      auto failed = fail_errno(out);
      ::unlink(out.c_str());
      return failed;
    }
    done += static_cast<std::size_t>(wrote);
  }
  if (::fsync(file.get()) != 0) return fail_errno(out);
  return whole->about;
}

Result<Transferred> import_log(asio::io_context& io, membership::Store& store, const std::string& log, bool replace,
                               const std::string& where) {
  auto whole = read_whole(log);
  if (!whole) return tl::unexpected(whole.error());
  const auto snapshot = snapshot_of(*whole, log);
  if (!snapshot) return tl::unexpected(snapshot.error());
  const std::uint64_t position = snapshot->snapshot().position();
  const auto present = look(io, store, where);
  if (!present) return tl::unexpected(present.error());
  if (present->anything && !replace)
    return fail(
        ErrorCode::refused,
        "{} has {} decisions already, and nothing is changed: choose another --job; or end all coordinators, and "
        "add --replace to put the {} of {} in their place",
        where, present->end, position, log);
  const std::string bytes = snapshot->SerializeAsString();
  const bool there = present->snapshot_position == position && present->snapshot == bytes;  // by an import before
  if (present->end > position || (present->snapshot_position == position && !there))
    return fail(
        ErrorCode::refused,
        "{} has {} decisions, and {} stands for {}: they would be mixed, and nothing is changed. Where those in "
        "the store are worth nothing, delete them first (etcdctl del --prefix), or choose another --job",
        where, present->end, log, position);
  proto::Leader nobody;
  nobody.set_term(present->leader.term());
  for (const auto& record : whole->records) nobody.set_term(std::max(nobody.term(), record.led().term()));
  nobody.set_term(nobody.term() + kTermsAhead);
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  nobody.set_since_ms(
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count()));
  const std::string lead = nobody.SerializeAsString();
  const auto claimed = ask(
      io, store,
      {.kind = Kind::claim, .token = present->leader_revision, .leader = present->leader_bytes, .value = lead}, where);
  if (!claimed) return tl::unexpected(claimed.error());
  if (claimed->outcome == Outcome::refused && claimed->leader != lead)  // else an earlier try was done
    return fail(ErrorCode::refused, "a coordinator has taken the lead in {} meanwhile: end all of them first", where);
  const auto put = ask(io, store,
                       {.kind = Kind::compact,
                        .token = claimed->leader_revision,
                        .position = position,
                        .leader = lead,
                        .value = bytes,
                        .whole = true},
                       where);
  if (!put) return tl::unexpected(put.error());
  // Where the lead is ours still, a refusal says that it is there already.
  if (put->outcome == Outcome::refused && put->leader_revision != claimed->leader_revision)
    return fail(ErrorCode::refused, "a coordinator has taken the lead in {} meanwhile: end all of them first", where);
  whole->about.records = position;
  whole->about.term = nobody.term();
  return whole->about;
}

}  // namespace rejoin::daemon
