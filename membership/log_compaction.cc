// A log that goes on from a snapshot, and the archives beside it.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "base/fail.h"
#include "membership/job_config.h"
#include "membership/log.h"
#include "membership/versions.h"

namespace rejoin::membership {

namespace {

// decisions.log → decisions.N.log
std::string archive_of(const std::string& path, std::uint64_t number) {
  const auto dot = path.rfind('.');
  const bool has_suffix = dot != std::string::npos && path.find('/', dot) == std::string::npos;
  return has_suffix ? fmt::format("{}.{}{}", path.substr(0, dot), number, path.substr(dot))
                    : fmt::format("{}.{}", path, number);
}

std::optional<struct stat> look_at(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? std::optional(status) : std::nullopt;
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// The number of an archive of that log, by its name.
std::optional<std::uint64_t> number_of(const std::filesystem::path& archive, const std::string& path) {
  constexpr std::uint64_t kMost = 1'000'000'000;
  const std::string digits = archive.stem().extension().string();
  std::uint64_t number = 0;
  if (digits.size() < 2 ||
      std::from_chars(digits.data() + 1, digits.data() + digits.size(), number).ec != std::errc{} || number > kMost ||
      std::filesystem::path(archive_of(path, number)).filename() != archive.filename())
    return std::nullopt;
  return number;
}

// The numbers of the archives beside a log; the newest has the greatest. One that is not seen would be taken for one
// that is not there.
Result<std::set<std::uint64_t>> archives_beside(const std::string& path) {
  std::set<std::uint64_t> numbers;
  std::error_code error, ignored;
  const auto parent = std::filesystem::path(path).parent_path();
  std::filesystem::directory_iterator each(parent.empty() ? "." : parent, error);
  for (; !error && each != std::filesystem::directory_iterator(); each.increment(error))
    if (const auto number = number_of(each->path(), path); number && each->is_regular_file(ignored))
      numbers.insert(*number);
  if (error) return fail(ErrorCode::io, "{}, whose archives can't be listed: {}", path, error.message());
  return numbers;
}

}  // namespace

// The new file, locked and on disk, under another name.
Result<Fd> Log::write_next(const proto::LogRecord& snapshot, std::uint64_t& end) const {
  Fd file(::open(next_path().c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return fail_errno(next_path());
  std::vector<proto::LogRecord> records{snapshot};
  const auto& job = snapshot.snapshot().job();
  const bool in_new_units = job.constant_batch() && job.unit() > 0 && job.ranks() > 0 &&
                            job.unit() != JobConfig::unit_before(job.batch(), job.ranks());
  const auto& ledger = snapshot.snapshot().ledger();
  const bool has_stages = !snapshot.snapshot().declared().of_ranks().empty();
  static_assert(Feature::stages == Feature::balance);  // else it is the later one that the log needs
  if (ledger.has_balance() || ledger.has_next_balance() || in_new_units || has_stages)
    records.emplace_back().mutable_needs()->set_protocol(static_cast<std::uint32_t>(Feature::balance));
  const Bytes bytes = log_bytes(records, 0);
  if (auto written = write_and_sync(file, bytes, 0); !written) return tl::unexpected(written.error());
  if (auto marked = write_and_sync(file, log_bytes({}, bytes.size()), bytes.size()); !marked)
    return tl::unexpected(marked.error());
  end = bytes.size();
  return file;
}

// From the link on the old file has two names, until the new one takes over the first of them.
Result<> Log::put_in_place() {
  const auto numbers = archives_beside(path_);
  if (!numbers) return tl::unexpected(numbers.error());
  const auto newest = numbers->empty() ? std::nullopt : look_at(archive_of(path_, *numbers->rbegin()));
  const auto ours = look_at(path_);
  const bool linked = newest && ours && same_file(*newest, *ours);  // by a compaction that came no further
  const auto name = archive_of(path_, numbers->empty() ? 1 : *numbers->rbegin() + 1);
  const bool no_links = !linked && disk_.link(path_.c_str(), name.c_str()) != 0;
  if (no_links && errno != EPERM && errno != EOPNOTSUPP && errno != ENOSYS) return fail_errno(name);
  if (no_links && disk_.rename(path_.c_str(), name.c_str()) != 0) return fail_errno(name);
  Result<> placed;
  if (disk_.sync(folder_.get()) != 0) placed = fail_errno(path_);
  else if (disk_.rename(next_path().c_str(), path_.c_str()) != 0) placed = fail_errno(next_path());
  if (!placed && no_links) failed_ = disk_.rename(name.c_str(), path_.c_str()) != 0 || disk_.sync(folder_.get()) != 0;
  return placed;
}

// Where a crash came between the two renames. Another coordinator that is just there has locked the new file.
Result<> Log::finish_compaction() const {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 || errno != ENOENT) return {};
  const Fd next(::open(next_path().c_str(), O_RDWR | O_CLOEXEC));
  if (!next) return {};
  if (auto locked = lock(next, next_path()); !locked) return locked;
  if (::rename(next_path().c_str(), path_.c_str()) != 0) return fail_errno(next_path());
  return {};
}

Result<> Log::compact(const proto::LogRecord& snapshot) {
  if (failed_) return fail(ErrorCode::io, "{} failed before; restart the coordinator", path_);
  if (auto checked = check_size(snapshot); !checked) return checked;
  std::uint64_t end = 0;
  auto next = write_next(snapshot, end);
  const auto placed = next ? put_in_place() : Result<>(tl::unexpected(next.error()));
  if (!placed) {
    if (!failed_) (void)::unlink(next_path().c_str());  // it would take the room that the old file may need
    return placed;
  }
  give_room_back();  // as an archive it needs none
  file_ = std::move(*next);
  end_ = end;
  remember_tail();
  if (disk_.sync(folder_.get()) == 0) return {};
  failed_ = true;
  return fail_errno(fmt::format("decision log {}, whose new file may not be at its path after a crash", path_));
}

// The newest stays: it says that a job was under way, where the log itself is lost.
Result<std::size_t> Log::remove_archives(std::size_t keep) const {
  const auto numbers = archives_beside(path_);
  if (!numbers) return tl::unexpected(numbers.error());
  std::size_t left = numbers->size(), gone = 0;
  for (auto number = numbers->begin(); left > std::max<std::size_t>(keep, 1); ++number, --left, ++gone) {
    const auto name = archive_of(path_, *number);
    if (::unlink(name.c_str()) != 0 && errno != ENOENT) return fail_errno(name);
  }
  return gone;
}

// A log without a record, where archives say that there was one.
Result<> Log::check_new() const {
  if (!records_.empty()) return {};
  const auto archives = archives_beside(path_);
  if (!archives) return tl::unexpected(archives.error());
  if (archives->empty()) return {};
  return fail(ErrorCode::not_found,
              "{} holds no decision, and {} says that a job was under way here: put the log back, or a copy of it. To "
              "start a new job, use another log directory, or move the archives away",
              path_, archive_of(path_, *archives->rbegin()));
}

Result<std::vector<proto::LogRecord>> legible_records(const std::string& directory) {
  const std::string path = directory + "/decisions.log";
  auto records = records_before_damage(path);
  std::error_code ignored;
  if (!records || !records->empty() || !std::filesystem::exists(directory, ignored)) return records;
  const auto archives = archives_beside(path);
  if (!archives) return tl::unexpected(archives.error());
  return archives->empty() ? records : records_before_damage(archive_of(path, *archives->rbegin()));
}

const proto::LogRecord::Job& job_of(const proto::LogRecord& first) {
  return first.has_snapshot() ? first.snapshot().job() : first.job();
}

bool has_needs_of_its_own(const std::vector<proto::LogRecord>& records) {
  if (records.size() < 2 || !records[0].has_snapshot() || !records[1].has_needs()) return false;
  return records.size() == 2 || !records[2].has_committed();
}

std::uint64_t records_of_job(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return 0;
  const std::uint64_t before = records.front().snapshot().position();
  return records.size() + (before > 0 ? before - 1 : 0) - (has_needs_of_its_own(records) ? 1 : 0);
}

namespace {

// Whether what follows on this file begins with `next`. A snapshot that names its position is that of a copy of what
// several coordinators have in their store: it may have come from there, because what lies before it is not all here.
Result<bool> ends_before(const proto::LogRecord& next, const Fd& file, const std::string& name) {
  if (next.snapshot().position() == 0) return true;
  return parse_file(file, name).map([&](const ParsedLog& log) {
    return records_of_job(log.records) == next.snapshot().position();
  });
}

// The archives that this file, which was the log when it was opened, goes on from, in their order. Each begins with a
// snapshot, but for a job's first; none is missing in between, but the oldest may be.
Result<std::vector<std::string>> archives_before(const Fd& log, const std::string& path) {
  std::vector<std::string> archives;
  auto first = first_record(log);
  struct stat current {};
  if (!first || !first->has_snapshot() || ::fstat(log.get(), &current) != 0) return archives;
  const auto numbers = archives_beside(path);
  if (!numbers) return tl::unexpected(numbers.error());
  auto number = numbers->empty() ? 0 : *numbers->rbegin();
  // It has become one itself: it was compacted since it was opened, or a crash has cut a compaction short.
  for (auto each : *numbers)
    if (const auto there = look_at(archive_of(path, each)); there && same_file(*there, current)) number = each - 1;
  for (std::string later = path; first->has_snapshot() && numbers->contains(number); --number) {
    const std::string name = archive_of(path, number);
    const Fd file(::open(name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!file && errno == ENOENT) break;  // just removed, and so are those before it
    if (!file) return fail_errno(name);
    const auto all_here = ends_before(*first, file, name);
    if (!all_here) return tl::unexpected(all_here.error());
    if (!*all_here) break;
    auto before = first_record(file);
    if (!before)
      return fail(ErrorCode::corrupt, "{} does not begin with an intact record; restore it from a copy", name);
    if (job_of(*before).id() != job_of(*first).id())
      return fail(ErrorCode::corrupt, "{} is of another job than {}. Move it away", name, later);
    first = std::move(before);
    later = name;
    archives.insert(archives.begin(), name);
  }
  return archives;
}

// What stands in several files as one log.
class Joined {
 public:
  explicit Joined(const std::function<void(const proto::LogRecord&)>& take) : take_(take) {}

  // What a snapshot says follows from the records before it, where these are there.
  Result<> add(const std::vector<proto::LogRecord>& records, const std::string& name) {
    auto record = records.begin();
    if (begun_ && record != records.end() && record->has_snapshot()) {
      if (committed_ != record->snapshot().committed())
        return fail(ErrorCode::corrupt,
                    "{} begins after step {}, and the archive before it ends after step {}: it is another log's. Move "
                    "it away",
                    name, record->snapshot().committed(), committed_);
      record += has_needs_of_its_own(records) ? 2 : 1;
    }
    for (; record != records.end(); ++record) {
      if (record->has_committed()) committed_ = record->committed().step();
      if (record->has_rolled_back()) committed_ = record->rolled_back().version();
      if (record->has_snapshot()) committed_ = record->snapshot().committed();
      begun_ = true;
      take_(*record);
    }
    return {};
  }
  bool begun() const { return begun_; }

 private:
  const std::function<void(const proto::LogRecord&)>& take_;
  std::uint64_t committed_ = 0;
  bool begun_ = false;
};

}  // namespace

Result<ParsedLog> for_each_record(const std::string& path, const std::function<void(const proto::LogRecord&)>& take) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file) return fail_errno(path);
  const auto archives = archives_before(file, path);
  if (!archives) return tl::unexpected(archives.error());
  Joined joined(take);
  for (const auto& name : *archives) {
    const Fd there(::open(name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!there && errno == ENOENT && !joined.begun()) continue;  // just removed
    if (!there) return fail_errno(name);
    const auto archive = parse_file(there, name);
    if (!archive) return archive;
    if (auto added = joined.add(archive->records, name); !added) return tl::unexpected(added.error());
  }
  auto newest = parse_file(file, path);
  if (!newest) return newest;
  if (auto added = joined.add(std::exchange(newest->records, {}), path); !added) return tl::unexpected(added.error());
  return newest;
}

Result<std::vector<proto::LogRecord>> read_log(const std::string& path) {
  std::vector<proto::LogRecord> records;
  return for_each_record(path, [&](const proto::LogRecord& record) { records.push_back(record); })
      .map([&](ParsedLog&&) { return std::move(records); });
}

}  // namespace rejoin::membership
