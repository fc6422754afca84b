#include "membership/log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace rejoin::membership {

namespace {

constexpr char kMagic[8] = {'R', 'J', 'N', 'L', 'O', 'G', '0', '1'};
constexpr std::uint32_t kMaxRecord = 16 * MiB;

struct RecordHeader {
  std::uint32_t length;
  std::uint32_t position;  // low bits of the record's offset: a stale block in its place does not pass
  std::uint64_t checksum;  // of length, position and bytes
};

std::uint64_t checksum_of(std::uint32_t length, std::uint32_t position, const void* bytes) {
  const std::uint64_t seed = (std::uint64_t{length} << 32) | position;
  return XXH3_64bits_withSeed(bytes, length, seed);
}

Result<Bytes> read_all(const Fd& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return fail_errno(path);
  Bytes bytes(static_cast<std::size_t>(status.st_size));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got = ::pread(file.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0) return fail_errno(path);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace

Bytes log_bytes(const std::vector<proto::LogRecord>& records, std::uint64_t at) {
  Bytes bytes;
  if (at == 0) {
    const auto head = as_bytes(std::string_view(kMagic, sizeof kMagic));
    bytes.assign(head.begin(), head.end());
  }
  for (const auto& record : records) {
    const std::string body = record.SerializeAsString();
    RecordHeader header{static_cast<std::uint32_t>(body.size()), static_cast<std::uint32_t>(at + bytes.size()), 0};
    header.checksum = checksum_of(header.length, header.position, body.data());
    const auto head = bytes_of(header), rest = as_bytes(body);
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.insert(bytes.end(), rest.begin(), rest.end());
  }
  return bytes;
}

Result<ParsedLog> parse_log(BytesView bytes, const std::string& path) {
  ParsedLog parsed{.records = {}, .whole = sizeof kMagic};
  if (bytes.size() < sizeof kMagic) {
    parsed.whole = 0;
    return parsed;
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    return fail(ErrorCode::corrupt, "{} is not a Rejoin decision log of this version", path);
  const auto broken = [&]() -> Result<ParsedLog> {
    // Torn by a crash only if nothing whole follows; anything else is damage that must not be overlooked.
    for (std::uint64_t at = parsed.whole + 1; at + sizeof(RecordHeader) <= bytes.size(); ++at) {
      RecordHeader header;
      std::memcpy(&header, bytes.data() + at, sizeof header);
      if (header.position != static_cast<std::uint32_t>(at) || header.length > bytes.size() - at - sizeof header)
        continue;
      if (header.checksum == checksum_of(header.length, header.position, bytes.data() + at + sizeof header))
        return fail(ErrorCode::corrupt,
                    "{} is damaged at byte {}: a whole record follows at {}. Restore it from a copy, "
                    "or start a new job with another log directory",
                    path, parsed.whole, at);
    }
    return std::move(parsed);
  };
  while (parsed.whole < bytes.size()) {
    RecordHeader header;
    if (bytes.size() - parsed.whole < sizeof header) return broken();
    std::memcpy(&header, bytes.data() + parsed.whole, sizeof header);
    const std::uint64_t left = bytes.size() - parsed.whole - sizeof header;
    if (header.length > kMaxRecord || header.length > left ||
        header.position != static_cast<std::uint32_t>(parsed.whole))
      return broken();
    const auto* body = bytes.data() + parsed.whole + sizeof header;
    proto::LogRecord record;
    if (header.checksum != checksum_of(header.length, header.position, body) ||
        !record.ParseFromArray(body, static_cast<int>(header.length)))
      return broken();
    parsed.records.push_back(std::move(record));
    parsed.whole += sizeof header + header.length;
  }
  return parsed;
}

Result<Log> Log::open(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return fail(ErrorCode::io, "log directory {}: {}", directory, error.message());
  Log log;
  log.path_ = directory + "/decisions.log";
  log.file_ = Fd(::open(log.path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!log.file_) return fail_errno(log.path_);
  if (::flock(log.file_.get(), LOCK_EX | LOCK_NB) != 0)
    return fail(ErrorCode::exhausted, "{} is in use by another coordinator", log.path_);
  auto bytes = read_all(log.file_, log.path_);
  if (!bytes) return tl::unexpected(bytes.error());
  auto parsed = parse_log(*bytes, log.path_);
  if (!parsed) return tl::unexpected(parsed.error());
  log.records_ = std::move(parsed->records);
  log.bytes_cut_ = bytes->size() - parsed->whole;
  if (::ftruncate(log.file_.get(), static_cast<off_t>(parsed->whole)) != 0) return fail_errno(log.path_);
  ::lseek(log.file_.get(), 0, SEEK_END);
  if (parsed->whole == 0 && (::write(log.file_.get(), kMagic, sizeof kMagic) != sizeof kMagic))
    return fail_errno(log.path_);
  if (::fsync(log.file_.get()) != 0) return fail_errno(log.path_);
  // The file's name must survive, too.
  Fd folder(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder || ::fsync(folder.get()) != 0) return fail_errno(directory);
  return log;
}

Result<> Log::append(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return {};
  if (failed_) return fail(ErrorCode::io, "{} failed before; restart the coordinator", path_);
  const Bytes bytes = log_bytes(records, static_cast<std::uint64_t>(::lseek(file_.get(), 0, SEEK_CUR)));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = ::write(file_.get(), bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      failed_ = true;
      return fail_errno(fmt::format("decision log {}", path_));
    }
    done += static_cast<std::size_t>(wrote);
  }
  if (::fdatasync(file_.get()) != 0) {
    failed_ = true;
    return fail_errno(fmt::format("decision log {}", path_));
  }
  return {};
}

Result<std::vector<proto::LogRecord>> read_log(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return fail_errno(path);
  auto bytes = read_all(file, path);
  if (!bytes) return tl::unexpected(bytes.error());
  auto parsed = parse_log(*bytes, path);
  if (!parsed) return tl::unexpected(parsed.error());
  return std::move(parsed->records);
}

RolledBack rolled_back(const std::vector<proto::LogRecord>& records) {
  RolledBack given_up;
  std::map<std::uint64_t, std::uint64_t> samples;  // by step
  for (const auto& record : records) {
    if (record.has_committed())
      for (const auto& member : record.committed().members())
        for (const auto& range : member.batch()) samples[record.committed().step()] += range.end() - range.begin();
    if (!record.has_rolled_back()) continue;
    for (auto step = samples.upper_bound(record.rolled_back().version()); step != samples.end();
         step = samples.erase(step))
      ++given_up.steps, given_up.samples += step->second;
  }
  return given_up;
}

std::map<std::uint64_t, Batch> trained_by_step(const std::vector<proto::LogRecord>& records) {
  std::map<std::uint64_t, Batch> trained;
  for (const auto& record : records) {
    if (record.has_rolled_back()) trained.erase(trained.upper_bound(record.rolled_back().version()), trained.end());
    if (!record.has_committed()) continue;
    for (const auto& member : record.committed().members())
      for (const auto& range : member.batch())
        trained[record.committed().step()].push_back({range.begin(), range.end()});
  }
  return trained;
}

}  // namespace rejoin::membership
