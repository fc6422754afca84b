// A log that goes on from a snapshot, and the archives beside it.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>

#include "base/fail.h"
#include "membership/log.h"

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

// The numbers of the archives beside a log; the newest has the greatest.
std::set<std::uint64_t> archives_beside(const std::string& path) {
  std::set<std::uint64_t> numbers;
  std::error_code error;
  const auto parent = std::filesystem::path(path).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(parent.empty() ? "." : parent, error)) {
    const std::string digits = entry.path().stem().extension().string();
    std::uint64_t number = 0;
    if (digits.size() < 2 ||
        std::from_chars(digits.data() + 1, digits.data() + digits.size(), number).ec != std::errc{})
      continue;
    if (std::filesystem::path(archive_of(path, number)).filename() == entry.path().filename()) numbers.insert(number);
  }
  return numbers;
}

// Those of them that follow one another without a gap up to the newest, in their order.
std::vector<std::string> newest_archives(const std::string& path) {
  const auto numbers = archives_beside(path);
  std::vector<std::string> archives;
  for (auto number = numbers.empty() ? 0 : *numbers.rbegin(); numbers.contains(number); --number)
    archives.insert(archives.begin(), archive_of(path, number));
  return archives;
}

}  // namespace

// The new file, locked and on disk, under another name.
Result<Fd> Log::write_next(const proto::LogRecord& snapshot, std::uint64_t& end) const {
  const std::string next = path_ + ".next";
  Fd file(::open(next.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return fail_errno(next);
  const Bytes bytes = log_bytes({snapshot}, 0);
  if (auto written = write_and_sync(file, bytes, 0); !written) return tl::unexpected(written.error());
  if (auto marked = write_and_sync(file, log_bytes({}, bytes.size()), bytes.size()); !marked)
    return tl::unexpected(marked.error());
  end = bytes.size();
  return file;
}

// From the link on the old file has two names, until the new one takes over the first of them.
Result<> Log::put_in_place() {
  const auto numbers = archives_beside(path_);
  const auto newest = numbers.empty() ? std::nullopt : look_at(archive_of(path_, *numbers.rbegin()));
  const auto ours = look_at(path_);
  const bool linked = newest && ours && same_file(*newest, *ours);  // by a compaction that came no further
  const auto name = archive_of(path_, numbers.empty() ? 1 : *numbers.rbegin() + 1);
  if (!linked && disk_.link(path_.c_str(), name.c_str()) != 0) return fail_errno(name);
  if (disk_.sync(folder_.get()) != 0) return fail_errno(path_);
  if (disk_.rename((path_ + ".next").c_str(), path_.c_str()) != 0) return fail_errno(path_ + ".next");
  if (disk_.sync(folder_.get()) == 0) return {};
  failed_ = true;
  return fail_errno(fmt::format("decision log {}, whose new file may not be at its path after a crash", path_));
}

Result<> Log::compact(const proto::LogRecord& snapshot) {
  if (failed_) return fail(ErrorCode::io, "{} failed before; restart the coordinator", path_);
  std::uint64_t end = 0;
  auto next = write_next(snapshot, end);
  if (!next) return tl::unexpected(next.error());
  if (auto placed = put_in_place(); !placed) return placed;
  file_ = std::move(*next);
  end_ = end;
  return {};
}

namespace {

std::uint64_t committed_by(const std::vector<proto::LogRecord>& records) {
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (record->has_committed()) return record->committed().step();
    if (record->has_rolled_back()) return record->rolled_back().version();
    if (record->has_snapshot()) return record->snapshot().committed();
  }
  return 0;
}

}  // namespace

Result<ParsedLog> parse_log_file(const std::string& path) {
  auto log = parse_one_file(path);
  if (!log || log->records.empty() || !log->records.front().has_snapshot()) return log;
  std::vector<proto::LogRecord> all;
  // What a snapshot says follows from the records before it, where these are there.
  const auto append = [&](std::vector<proto::LogRecord>& records, const std::string& name) -> Result<> {
    auto begin = records.begin();
    if (!all.empty() && begin != records.end() && begin->has_snapshot()) {
      if (const std::uint64_t before = committed_by(all); before != begin->snapshot().committed())
        return fail(ErrorCode::corrupt,
                    "{} begins after step {}, and the archive before it ends after step {}: it is another log's. Move "
                    "it away",
                    name, begin->snapshot().committed(), before);
      ++begin;
    }
    all.insert(all.end(), std::make_move_iterator(begin), std::make_move_iterator(records.end()));
    return {};
  };
  const auto current = look_at(path);
  for (const auto& name : newest_archives(path)) {
    const auto there = look_at(name);
    if (there && current && same_file(*there, *current)) continue;  // of a compaction that a crash has cut short
    auto archive = parse_one_file(name);
    if (!archive) return archive;
    if (auto appended = append(archive->records, name); !appended) return tl::unexpected(appended.error());
  }
  if (auto appended = append(log->records, path); !appended) return tl::unexpected(appended.error());
  log->records = std::move(all);
  return log;
}

Result<std::vector<proto::LogRecord>> read_log(const std::string& path) {
  return parse_log_file(path).map([](ParsedLog&& parsed) { return std::move(parsed.records); });
}

}  // namespace rejoin::membership
