#include "daemon/log_transfer.h"

#include <fcntl.h>
#include <unistd.h>

#include <asio.hpp>
#include <chrono>
#include <functional>
#include <optional>

#include "base/clock.h"
#include "base/deadlines.h"
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

// A log is longer than memory: its records are taken one by one.
struct WholeLog {
  std::vector<proto::LogRecord> first;  // of its records the first three: they say what the others stand for
  Transferred about;
  std::uint64_t term = 0;  // the highest
  std::uint64_t records_of_job() const { return membership::records_of_job(first) + about.records - first.size(); }
};

Result<WholeLog> read_whole(const std::string& path, const std::function<Result<>(const proto::LogRecord&)>& take) {
  WholeLog whole;
  Result<> taken;
  const auto read = membership::for_each_record(path, [&](const proto::LogRecord& record) {
    if (!taken) return;
    if (whole.first.size() < 3) whole.first.push_back(record);
    ++whole.about.records;
    whole.term = std::max(whole.term, record.led().term());
    if (record.has_snapshot()) whole.about.committed = Step(record.snapshot().committed());
    if (record.has_committed()) whole.about.committed = Step(record.committed().step());
    if (record.has_rolled_back()) whole.about.committed = Step(record.rolled_back().version());
    taken = take(record);
  });
  if (!read) return tl::unexpected(read.error());
  if (!taken) return tl::unexpected(taken.error());
  if (whole.first.empty()) return fail(ErrorCode::not_found, "{} holds no decision", path);
  whole.about.torn = read->torn;
  whole.about.job = membership::job_of(whole.first.front()).id();
  whole.about.begins_after = whole.first.front().snapshot().committed();
  return whole;
}

// What all records lead to, whose snapshot stands for them in the store.
class Replayed {
 public:
  explicit Replayed(const std::string& path) : path_(path) {}
  Result<> take(const proto::LogRecord& record) {
    if (!machine_) {
      const auto& job = membership::job_of(record);
      machine_.emplace(membership::JobConfig{.replicas = job.replicas(),
                                             .ranks = job.ranks(),
                                             .batch = job.batch(),
                                             .constant_batch = job.constant_batch(),
                                             .links = membership::rule_in(job)});
    }
    if (auto replayed = machine_->replay(record); !replayed)
      return fail(replayed.error().code, "{}: {}", path_, replayed.error().message);
    return {};
  }
  // A snapshot that a single coordinator has made says of how many records: any number does, for a new store.
  proto::LogRecord snapshot(std::uint64_t position) const {
    proto::LogRecord snapshot = machine_->snapshot();
    snapshot.mutable_snapshot()->set_position(position);
    return snapshot;
  }

 private:
  const std::string& path_;
  std::optional<membership::Coordinator> machine_;
};

// A new file, which is made when there is something to write.
class NewLog {
 public:
  explicit NewLog(const std::string& path) : path_(path) {}
  Result<> take(const proto::LogRecord& record) {
    waiting_.push_back(record);
    bytes_ += record.ByteSizeLong();
    return bytes_ < kAtOnce ? Result<>() : write();
  }
  Result<> end() {
    if (!waiting_.empty())
      if (auto written = write(); !written) return written;
    if (auto marked = write(); !marked) return marked;  // without records it is the mark that says that all is there
    return ::fsync(file_.get()) == 0 ? Result<>() : Result<>(fail_errno(path_));
  }
  void give_up() {
    if (file_) ::unlink(path_.c_str());
  }

 private:
  static constexpr std::size_t kAtOnce = 1 * MiB;
  Result<> write() {
    if (!file_) file_ = Fd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file_ && errno == EEXIST) return fail(ErrorCode::io, "{} exists: give a name that nothing has yet", path_);
    if (!file_) return fail_errno(path_);
    const Bytes bytes = membership::log_bytes(std::exchange(waiting_, {}), at_);
    bytes_ = 0;
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t wrote = ::write(file_.get(), bytes.data() + done, bytes.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return fail_errno(path_);
      done += static_cast<std::size_t>(wrote);
    }
    at_ += bytes.size();
    return {};
  }
  const std::string& path_;
  Fd file_;
  std::uint64_t at_ = 0;
  std::vector<proto::LogRecord> waiting_;
  std::size_t bytes_ = 0;  // of these
};

// The store's answer. A request whose answer is lost is repeated as it is, but not for ever. Who has nothing but read
// yet can do all of it again.
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
  return fail(ErrorCode::unavailable, "{} does not answer: {}. {}", where, why,
              request.kind == Kind::read ? "Nothing was written: see to it, and do this again"
                                         : "Nothing, or a part, was written: see to it, and do this again with "
                                           "--replace");
}

// How far the store's log reaches, and who leads. Nothing: it has nothing of this job.
struct Present {
  std::uint64_t end = 0, leader_revision = 0, alive_revision = 0, snapshot_position = 0, job = 0;
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
    present.alive_revision = answer->alive_revision;
    present.anything |= answer->leader_revision != 0 || answer->snapshot_position != 0 || !answer->entries.empty();
    if (!answer->leader.empty() && !present.leader.ParseFromString(answer->leader))
      return fail(ErrorCode::corrupt, "{} holds something else than this version writes", where);
    present.snapshot_position = answer->snapshot_position;
    if (!answer->snapshot.empty()) {
      present.end = answer->snapshot_position;
      present.snapshot = answer->snapshot;
      proto::LogRecord snapshot;
      if (!snapshot.ParseFromString(answer->snapshot))
        return fail(ErrorCode::corrupt, "{} has a snapshot that is damaged", where);
      present.job = membership::job_of(snapshot).id();
    }
    for (const auto& [position, bytes] : answer->entries) {
      proto::LogEntry entry;
      if (!entry.ParseFromString(bytes)) return fail(ErrorCode::corrupt, "{} is damaged at record {}", where, position);
      present.end = position + static_cast<std::uint64_t>(entry.records_size());
      if (position == 0 && entry.records_size() > 0) present.job = membership::job_of(entry.records(0)).id();
    }
    if (!answer->more) return present;
  }
}

// A leader with nothing to write shows there all the same that it lives, the more seldom the longer its silence is. One
// that does not say how long that is, of an older release, is taken to have the default, which `watch` is enough for.
Result<bool> leader_lives(asio::io_context& io, membership::Store& store, const Present& present, Duration watch,
                          const std::string& where) {
  if (present.leader.instance() == 0) return false;
  constexpr std::uint64_t longest = deadlines::kLongestSilence.count();
  const auto silence = std::chrono::milliseconds(std::min(present.leader.silence_ms(), longest));
  const Duration in_all = watch + 2 * deadlines::kLeaderSign.of(silence);
  for (const TimePoint until = SteadyClock().now() + in_all; SteadyClock().now() < until;) {
    const auto answer = ask(io, store, {.kind = Kind::read, .position = present.end, .value = {}}, where);
    if (!answer) return tl::unexpected(answer.error());
    if (answer->leader_revision != present.leader_revision || answer->alive_revision != present.alive_revision ||
        answer->snapshot_position != present.snapshot_position || !answer->entries.empty())
      return true;
    asio::steady_timer pause(io, watch / 20);
    pause.async_wait([](asio::error_code) {});
    io.restart();
    io.run_one();
  }
  return false;
}

}  // namespace

Result<Transferred> export_log(const std::string& log, const std::string& out) {
  NewLog file(out);
  const auto whole = read_whole(log, [&](const auto& record) { return file.take(record); });
  if (auto written = whole ? file.end() : Result<>(tl::unexpected(whole.error())); !written) {
    file.give_up();
    return tl::unexpected(written.error());
  }
  return whole->about;
}

Result<Transferred> import_log(asio::io_context& io, membership::Store& store, const std::string& log, bool replace,
                               const std::string& where, const std::string& prefix, Duration watch) {
  Replayed state(log);
  auto whole = read_whole(log, [&](const auto& record) { return state.take(record); });
  if (!whole) return tl::unexpected(whole.error());
  const std::uint64_t position = whole->records_of_job();
  const auto snapshot = state.snapshot(position);
  const auto present = look(io, store, where);
  if (!present) return tl::unexpected(present.error());
  if (present->job != 0 && whole->about.job != 0 && present->job != whole->about.job)
    return fail(ErrorCode::refused,
                "{} has {} decisions of job {:016x}, and {} is of job {:016x}: nothing is changed. Choose the log, or "
                "the --job, that is meant; or, where those in the store are worth nothing, end all coordinators of "
                "that --job, delete its keys (etcdctl del --prefix {}), and do this again",
                where, present->end, present->job, log, whole->about.job, prefix);
  if (present->anything && !replace)
    return fail(
        ErrorCode::refused,
        "{} has {} decisions already, and nothing is changed: choose another --job; or end all coordinators, and "
        "add --replace to put the {} of {} in their place",
        where, present->end, position, log);
  const std::string bytes = snapshot.SerializeAsString();
  const bool there = present->snapshot_position == position && present->snapshot == bytes;  // by an import before
  if (present->end > position || (present->snapshot_position == position && !there))
    return fail(
        ErrorCode::refused,
        "{} has {} decisions, and {} stands for {}: they would be mixed, and nothing is changed. Where those in "
        "the store are worth nothing, end all coordinators of this job and delete its keys (etcdctl del --prefix {}), "
        "or choose another --job",
        where, present->end, log, position, prefix);
  const auto lives = leader_lives(io, store, *present, watch, where);
  if (!lives) return tl::unexpected(lives.error());
  if (*lives)
    return fail(ErrorCode::refused,
                "{} at {} leads in {}, and lives: nothing is changed. End all coordinators of this job first",
                present->leader.name(), present->leader.address(), where);
  proto::Leader nobody;
  nobody.set_term(std::max(present->leader.term(), whole->term) + kTermsAhead);
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
