#include "membership/log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/fail.h"

namespace rejoin::membership {

namespace {

constexpr std::string_view kMagic = "RJNLOG02", kOldMagic = "RJNLOG01";  // the old one: without marks
constexpr std::uint32_t kMaxRecord = 16 * MiB;
constexpr std::uint32_t kMark = 0xffffffff;  // a length: no record, all before it is on disk

struct RecordHeader {
  std::uint32_t length;
  std::uint32_t position;  // low bits of the record's offset: a stale block in its place does not pass
  std::uint64_t checksum;  // of length, position and bytes
};

constexpr std::uint64_t kMostHashed = 64 * MiB;  // of records, in the search for what is intact behind damage
static_assert(sizeof(RecordHeader) == kMarkBytes);

std::uint64_t checksum_of(const RecordHeader& header, const void* bytes) {
  const std::uint64_t seed = (std::uint64_t{header.length} << 32) | header.position;
  return XXH3_64bits_withSeed(bytes, header.length == kMark ? 0 : header.length, seed);
}

// The record or mark that begins here, if there is an intact one. `hashable`: bytes of records for whose checksums
// there is time, in all; a record of more is passed over, and none is left.
std::optional<RecordHeader> frame_at(BytesView bytes, std::uint64_t at, std::uint64_t* hashable = nullptr) {
  RecordHeader header;
  if (bytes.size() - at < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes.data() + at, sizeof header);
  if (header.position != static_cast<std::uint32_t>(at)) return std::nullopt;
  const bool mark = header.length == kMark;
  if (!mark && (header.length > kMaxRecord || header.length > bytes.size() - at - sizeof header)) return std::nullopt;
  if (!mark && hashable != nullptr) {
    const bool has_time = header.length <= *hashable;
    *hashable = has_time ? *hashable - header.length : 0;
    if (!has_time) return std::nullopt;
  }
  if (header.checksum != checksum_of(header, bytes.data() + at + sizeof header)) return std::nullopt;
  return header;
}

// Where the room begins behind what is written.
std::uint64_t end_of_written(BytesView bytes, std::uint64_t from) {
  const auto behind = std::find_if(bytes.rbegin(), bytes.rend() - static_cast<std::ptrdiff_t>(from),
                                   [](std::byte byte) { return byte != std::byte{}; });
  return static_cast<std::uint64_t>(bytes.rend() - behind);
}

// What is broken from here on is torn by a crash, unless a mark follows, or in an old log anything intact. A record
// that names its own position is there by chance once in 4 GiB; a file that is made of such ones is damaged.
Result<> check_torn(BytesView bytes, std::uint64_t broken, std::uint64_t end, bool old, const std::string& path) {
  std::uint64_t hashable = old ? kMostHashed : 0;
  for (std::uint64_t at = broken + 1; at < end; ++at) {
    const auto header = frame_at(bytes, at, &hashable);
    if (!header || (header->length != kMark && !old)) continue;
    return fail(ErrorCode::corrupt,
                "{} is damaged at byte {}, and what was decided there had been acknowledged: byte {} says so. Restore "
                "it from a copy, or start a new job with another log directory",
                path, broken, at);
  }
  if (!old || hashable > 0) return {};
  return fail(ErrorCode::corrupt, "{} is damaged at byte {}, and what follows is no trace of a crash", path, broken);
}

Result<Bytes> read_all(const Fd& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return fail_errno(path);
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::invalid_argument, "{} is no regular file", path);
  Bytes bytes(static_cast<std::size_t>(status.st_size));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got = ::pread(file.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0) return fail_errno(path);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

// What is before the damage, where there is any.
ParsedLog parse_until_damage(BytesView bytes, const std::string& path, Result<>& sound) {
  ParsedLog parsed;
  const bool zeros = bytes.size() <= kMagic.size() + sizeof(RecordHeader) &&
                     std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{}; });
  const bool begun = bytes.size() < kMagic.size() && kMagic.starts_with(as_text(bytes));
  if (begun || zeros) {  // power was lost when the file was made
    parsed.torn = bytes.size();
    return parsed;
  }
  const auto magic = as_text(bytes.first(std::min(bytes.size(), kMagic.size())));
  if (magic != kMagic && magic != kOldMagic) {
    sound = fail(ErrorCode::corrupt, "{} is not a Rejoin decision log of this version", path);
    return parsed;
  }
  parsed.old = magic == kOldMagic;
  parsed.intact = kMagic.size();
  for (std::uint64_t at = parsed.intact; at < bytes.size();) {
    const auto header = frame_at(bytes, at);
    proto::LogRecord record;
    const bool intact = header && (header->length == kMark || record.ParseFromArray(bytes.data() + at + sizeof *header,
                                                                                    static_cast<int>(header->length)));
    if (!intact) {
      const auto end = end_of_written(bytes, at);
      sound = check_torn(bytes, at, end, parsed.old, path);
      parsed.torn = end - at;
      break;
    }
    at += sizeof *header;
    if (header->length == kMark) {
      parsed.marked = at;
      continue;
    }
    at += header->length;
    parsed.intact = at;
    parsed.records.push_back(std::move(record));
  }
  return parsed;
}

}  // namespace

Bytes log_bytes(const std::vector<proto::LogRecord>& records, std::uint64_t at) {
  Bytes bytes;
  const auto add = [&](std::uint32_t length, std::string_view body) {
    RecordHeader header{length, static_cast<std::uint32_t>(at + bytes.size()), 0};
    header.checksum = checksum_of(header, body.data());
    const auto head = bytes_of(header), rest = as_bytes(body);
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.insert(bytes.end(), rest.begin(), rest.end());
  };
  if (at > 0) {
    add(kMark, {});
  } else {
    const auto head = as_bytes(kMagic);
    bytes.assign(head.begin(), head.end());
  }
  for (const auto& record : records) {
    const std::string body = record.SerializeAsString();
    add(static_cast<std::uint32_t>(body.size()), body);
  }
  return bytes;
}

Result<ParsedLog> parse_log(BytesView bytes, const std::string& path) {
  Result<> sound;
  auto parsed = parse_until_damage(bytes, path, sound);
  return sound.map([&] { return std::move(parsed); });
}

// Its coordinator may be at work: what is appended while its bytes are read, some before and some after it, looks like
// damage. The next time that is whole.
Result<ParsedLog> parse_file(const Fd& file, const std::string& path) {
  constexpr int kTries = 4;
  for (int tries = 1;; ++tries) {
    auto bytes = read_all(file, path);
    if (!bytes) return tl::unexpected(bytes.error());
    auto parsed = parse_log(*bytes, path);
    if (parsed || tries == kTries) return parsed;
  }
}

// A pipe would wait for a writer.
Result<ParsedLog> parse_one_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file) return fail_errno(path);
  return parse_file(file, path);
}

Result<std::vector<proto::LogRecord>> records_before_damage(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file && (errno == ENOENT || errno == ENOTDIR)) return std::vector<proto::LogRecord>{};
  if (!file) return fail_errno(path);
  const auto bytes = read_all(file, path);
  if (!bytes) return tl::unexpected(bytes.error());
  Result<> sound;
  auto parsed = parse_until_damage(*bytes, path, sound);
  if (!sound && parsed.records.empty()) return tl::unexpected(sound.error());
  return std::move(parsed.records);
}

std::optional<proto::LogRecord> first_record(const Fd& file) {
  const auto read = [&](std::uint64_t at, void* to, std::size_t size) {
    return ::pread(file.get(), to, size, static_cast<off_t>(at)) == static_cast<ssize_t>(size);
  };
  RecordHeader header;
  std::uint64_t at = kMagic.size();
  do {
    if (!read(at, &header, sizeof header)) return std::nullopt;
    at += sizeof header;
  } while (header.length == kMark);
  if (header.length > kMaxRecord) return std::nullopt;
  Bytes body(header.length);
  proto::LogRecord record;
  if (!read(at, body.data(), body.size()) || header.checksum != checksum_of(header, body.data()) ||
      !record.ParseFromArray(body.data(), static_cast<int>(body.size())))
    return std::nullopt;
  return record;
}

Disk Disk::real() {
  const auto free = [](int fd) -> std::uint64_t {
    struct statvfs about {};
    return ::fstatvfs(fd, &about) == 0 ? std::uint64_t{about.f_bavail} * about.f_frsize : 0;
  };
  return {.write = ::pwrite, .sync = ::fdatasync, .link = ::link, .rename = ::rename, .free = free};
}

Result<> Log::lock(const Fd& file, const std::string& path) const {
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return {};
  if (errno != EWOULDBLOCK) return fail_errno(fmt::format("locking {}", path));
  return fail(ErrorCode::refused, "{} is in use by another coordinator", path_);
}

Result<Log> Log::open(const std::string& directory, Disk disk) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return fail(ErrorCode::io, "log directory {}: {}", directory, error.message());
  Log log;
  log.disk_ = std::move(disk);
  log.path_ = directory + "/decisions.log";
  log.folder_ = Fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!log.folder_) return fail_errno(directory);
  if (auto finished = log.finish_compaction(); !finished) return tl::unexpected(finished.error());
  do {  // until it is the one at its path: another coordinator may just have compacted it, and ended
    log.file_ = Fd(::open(log.path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!log.file_) return fail_errno(log.path_);
    if (auto locked = log.lock(log.file_, log.path_); !locked) return tl::unexpected(locked.error());
  } while (!log.in_its_place());
  (void)::unlink(log.next_path().c_str());  // of a compaction that a crash has cut short
  if (auto recovered = log.recover(); !recovered) return tl::unexpected(recovered.error());
  if (auto checked = log.check_new(); !checked) return tl::unexpected(checked.error());
  // The file's name must survive, too.
  if (::fsync(log.folder_.get()) != 0) return fail_errno(directory);
  return log;
}

// Cuts off what is torn, and makes sure that the rest is on disk. What no mark speaks for is written again: where a
// sync had failed, the kernel may show it and have given up writing it; so may it with the last mark, which was not
// synced before.
Result<> Log::recover() {
  auto bytes = read_all(file_, path_);
  if (!bytes) return tl::unexpected(bytes.error());
  auto parsed = parse_log(*bytes, path_);
  if (!parsed) return tl::unexpected(parsed.error());
  if (::ftruncate(file_.get(), static_cast<off_t>(parsed->intact)) != 0) return fail_errno(path_);
  Bytes again = parsed->intact == 0 ? log_bytes({}, 0) : Bytes{};
  const std::uint64_t last_mark = parsed->marked == 0 ? 0 : parsed->marked - kMarkBytes;
  const std::uint64_t from = std::min(last_mark, parsed->intact);
  again.insert(again.end(), bytes->begin() + static_cast<std::ptrdiff_t>(from),
               bytes->begin() + static_cast<std::ptrdiff_t>(parsed->intact));
  if (auto written = write_and_sync(file_, again, from); !written) return written;
  records_ = std::move(parsed->records);
  bytes_cut_ = parsed->torn;
  end_ = from + again.size();
  if (auto marked = write_and_sync(file_, log_bytes({}, end_), end_); !marked) return marked;
  if (parsed->old)  // all of it has a mark behind it now
    if (auto named = write_and_sync(file_, as_bytes(kMagic), 0); !named) return named;
  remember_tail();
  return {};
}

Result<> Log::write(const Fd& file, BytesView bytes, std::uint64_t at) const {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote =
        disk_.write(file.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(at + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote == 0) errno = EIO;  // it would take nothing for ever
    if (wrote <= 0) return fail_errno(fmt::format("decision log {}", path_));
    done += static_cast<std::size_t>(wrote);
  }
  return {};
}

Result<> Log::write_and_sync(const Fd& file, BytesView bytes, std::uint64_t at) const {
  if (auto written = write(file, bytes, at); !written) return written;
  return sync(file);
}

Result<> Log::sync(const Fd& file) const {
  if (disk_.sync(file.get()) != 0) return fail_errno(fmt::format("decision log {}", path_));
  return {};
}

// Errors of a file system that can't tell just now say nothing of the file.
bool Log::in_its_place() const {
  struct stat ours {
  }, there{};
  if (::fstat(file_.get(), &ours) != 0) return true;
  if (::stat(path_.c_str(), &there) != 0) return errno != ENOENT && errno != ENOTDIR;
  return ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
}

std::optional<std::uint64_t> Log::file_size() const {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) return std::nullopt;
  return static_cast<std::uint64_t>(status.st_size);
}

void Log::remember_tail() {
  tail_.resize(std::min<std::size_t>(end_, kMarkBytes));
  const auto from = static_cast<off_t>(end_ - tail_.size());
  const ssize_t read = ::pread(file_.get(), tail_.data(), tail_.size(), from);
  if (read != static_cast<ssize_t>(tail_.size())) tail_.clear();
}

// Whether what was just before the records that were written now is there still. Where the file was cut and then made
// longer, zeros are.
bool Log::tail_is_there() const {
  Bytes now(tail_.size());
  const auto from = static_cast<off_t>(end_ - tail_.size());
  return ::pread(file_.get(), now.data(), now.size(), from) != static_cast<ssize_t>(now.size()) || now == tail_;
}

Result<> Log::cut_to(std::optional<std::uint64_t> size) {
  failed_ = true;
  return fail(ErrorCode::corrupt,
              "decision log {} was cut from {} to {} while the job ran: nothing may write to it but its coordinator. "
              "Put back a copy of it; without one, start the job from a checkpoint with a new log directory",
              path_, human_bytes(end_), size ? human_bytes(*size) : "less");
}

Result<> Log::check_size(const proto::LogRecord& record) const {
  const std::size_t size = record.ByteSizeLong();
  if (size <= kMaxRecord) return {};
  return fail(ErrorCode::invalid_argument, "{}: a record of {} is over the limit of {}", path_, human_bytes(size),
              human_bytes(kMaxRecord));
}

Result<> Log::append(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return {};
  if (failed_) return fail(ErrorCode::io, "{} failed before; restart the coordinator", path_);
  for (const auto& record : records)
    if (auto checked = check_size(record); !checked) return checked;
  const auto size = file_size();
  if (size && *size < end_) return cut_to(*size);
  const Bytes bytes = log_bytes(records, end_);
  const std::uint64_t end = end_ + bytes.size();
  auto written = write(file_, bytes, end_);
  if (written && size && end + kMarkBytes > *size) make_room(end);
  if (written) written = sync(file_);
  if (!written) {
    failed_ = true;
    return written;
  }
  if (!in_its_place()) {
    failed_ = true;
    return fail(ErrorCode::not_found,
                "decision log {} was removed or moved away while the job ran: what is decided from now on nobody would "
                "know. Put it back, or a copy of it; without one, start the job from a checkpoint with a new log "
                "directory",
                path_);
  }
  // A sync takes long enough for somebody to cut the file meanwhile, which the next write would hide.
  if (const auto now = file_size(); now && *now < end) return cut_to(*now);
  if (!tail_is_there()) return cut_to(std::nullopt);
  end_ = end;
  tail_.assign(bytes.end() - static_cast<std::ptrdiff_t>(std::min(bytes.size(), kMarkBytes)), bytes.end());
  // They are durable whatever becomes of the mark; the next append writes it again, and fails if this has.
  (void)write(file_, log_bytes({}, end_), end_);
  return {};
}

}  // namespace rejoin::membership
