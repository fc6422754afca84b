#include "base/flight.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/digest.h"
#include "base/entropy.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/flight_ring.h"
#include "base/log.h"
#include "base/no_signals.h"
#include "base/populate.h"
#include "base/unix_socket.h"

namespace rejoin::flight {

namespace {

struct Recording {
  Fd file;  // locked
  Mapping memory;
  Rings rings;
};

std::atomic<Recording*> current = nullptr;  // never freed: threads may be writing until the process has ended
std::mutex opening;

std::int64_t now_ns() { return SteadyClock().now().time_since_epoch().count(); }
std::int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string line_of(const char* path) {
  const Fd file(::open(path, O_RDONLY | O_CLOEXEC));
  char text[128];
  const ssize_t length = file ? ::read(file.get(), text, sizeof text) : -1;
  std::string line(text, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return line.substr(0, line.find('\n'));
}

std::string host_name() {
  char host[64] = {};
  return ::gethostname(host, sizeof host - 1) == 0 ? host : "";
}

// A child of fork() has its parent's memory and lock: it gives both up, and records nothing.
void in_child() {
  Recording* const parents = current.exchange(nullptr);
  if (parents == nullptr) return;
  ::munmap(parents->memory.data(), parents->memory.size());
  ::close(parents->file.get());
}

// Anybody may make a directory of that name before us.
Result<Fd> open_default_directory() {
  const std::string path = default_directory();
  Fd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!folder) return fail_errno(path);
  struct stat status {};
  if (::fstat(folder.get(), &status) != 0) return fail_errno(path);
  // Only its owner may change a directory's mode, and in a user namespace another's may have our user's number.
  const bool ours =
      status.st_uid == ::geteuid() && (!shares_its_number() || ::fchmod(folder.get(), status.st_mode & 07777) == 0);
  if (!ours || (status.st_mode & 022) != 0) return fail(ErrorCode::refused, "{} is not this user's alone", path);
  return folder;
}

Result<Fd> open_directory(const std::string& directory) {
  const std::string path = directory.empty() ? default_directory() : directory;
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return fail_errno(path);
  if (directory.empty()) return open_default_directory();
  Fd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return fail_errno(path);
  return folder;
}

constexpr time_t kYoung = 1;  // seconds: so long at least, and up to one more

struct Left {
  std::string name;
  struct timespec since;
  std::uint64_t bytes = 0, job = 0;
};

// Of processes that have ended, the newest first.
std::vector<Left> left_in(const Fd& folder) {
  std::vector<Left> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> all(::fdopendir(::fcntl(folder.get(), F_DUPFD_CLOEXEC, 3)), ::closedir);
  if (!all) return found;
  while (const dirent* entry = ::readdir(all.get())) {
    const std::string name = entry->d_name;
    if (!name.ends_with(kSuffix)) continue;
    const Fd file(::openat(folder.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0) continue;
    const bool ours = S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
    // One that has just been made may not be locked yet; to try it now would keep its process from it.
    const bool young = ::time(nullptr) - status.st_mtim.tv_sec <= kYoung;
    if (!ours || young || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    Left left{name, status.st_mtim, static_cast<std::uint64_t>(status.st_blocks) * 512};
    (void)::pread(file.get(), &left.job, sizeof left.job, offsetof(Header, job));
    found.push_back(left);
  }
  std::ranges::sort(found, [](const Left& one, const Left& other) {
    return std::pair(one.since.tv_sec, one.since.tv_nsec) > std::pair(other.since.tv_sec, other.since.tv_nsec);
  });
  return found;
}

// One that writes a block to another place each time needs room for that, and where there is none left, whoever stores
// into mapped memory gets SIGBUS, though the file had all its blocks.
Result<> must_keep_blocks(const Fd& folder) {
  constexpr std::pair<decltype(statfs::f_type), const char*> which[] = {
      {0x9123683e, "btrfs"}, {0x2fc12fc1, "ZFS"}, {static_cast<decltype(statfs::f_type)>(0xca451a4e), "bcachefs"}};
  struct statfs system {};
  if (::fstatfs(folder.get(), &system) != 0) return {};
  for (const auto& [type, name] : which)
    if (system.f_type == type)
      return fail(
          ErrorCode::unavailable,
          "it lies on {}, where a full disk would end this process; give a directory of another file system, or "
          "none: it lies in memory then",
          name);
  return {};
}

void clean(const Fd& folder) {
  constexpr time_t week = 7 * 24 * 3600;
  std::uint64_t most = kMostBytesLeft;
  struct statvfs system {};  // a container's /dev/shm may be small, and others need it; 0: it does not say
  if (::fstatvfs(folder.get(), &system) == 0 && system.f_blocks > 0)
    most = std::min(most, std::uint64_t{system.f_blocks} * system.f_frsize / kShareLeft);
  const time_t now = ::time(nullptr);
  std::uint64_t bytes = 0;
  std::size_t files = 0, jobless = 0;
  for (const auto& one : left_in(folder)) {
    if (one.job == 0 && ++jobless > kMostJoblessLeft) {
      ::unlinkat(folder.get(), one.name.c_str(), 0);
      continue;
    }
    bytes += one.bytes;
    if (++files > kMostLeft || bytes > most || now - one.since.tv_sec > week)
      ::unlinkat(folder.get(), one.name.c_str(), 0);
  }
}

void put_text(std::span<char> field, std::string_view text) {
  text = text.substr(0, field.size() - 1);
  std::copy(text.begin(), text.end(), field.begin());
}

Header describe(const std::string& who) {
  Header header{};
  header.pid = static_cast<std::uint32_t>(::getpid());
  header.opened_ns = now_ns();
  header.opened_wall_ns = wall_ns();
  header.clock = clock_id();
  put_text(header.who, who);
  put_text(header.host, host_name());
  return header;
}

}  // namespace

std::string in_file_name(std::string who) {
  constexpr std::size_t longest = 200;  // behind it are numbers and a suffix, and a name of a file has 255 bytes
  for (char& c : who)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '_' && c != '.') c = '_';
  if (who.starts_with('.')) who[0] = '_';  // lists of files leave such names out
  return who.substr(0, longest);
}

std::string default_directory() {
  const char* parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  return fmt::format("{}/rejoin-{}", parent, ::geteuid());
}

Result<> check_default_directory() {
  if (::access(default_directory().c_str(), F_OK) != 0) return {};
  if (auto own = open_default_directory(); !own) return tl::unexpected(own.error());
  return {};
}

std::uint64_t clock_id() {
  static const std::uint64_t id = [] {
    struct stat time_namespace {};
    const bool known = ::stat("/proc/self/ns/time", &time_namespace) == 0;
    std::string machine = line_of("/proc/sys/kernel/random/boot_id");
    if (machine.empty()) machine = host_name();  // as in a sandbox; all of these have no clock in common
    const std::string text = fmt::format("{} {}", machine, known ? time_namespace.st_ino : 0);
    return digest(as_bytes(text)) | 1;
  }();
  return id;
}

Result<> try_open(const std::string& directory, const std::string& who, const std::string& program) {
  const std::lock_guard lock(opening);
  if (current.load(std::memory_order_acquire) != nullptr) {
    flight::record(Kind::named, {}, who);
    return {};
  }
  auto folder = open_directory(directory);
  if (!folder) return tl::unexpected(folder.error());
  if (auto keeps = must_keep_blocks(*folder); !keeps) return keeps;
  clean(*folder);
  const std::string name = fmt::format("{}.{}.{:08x}{}", in_file_name(who), ::getpid(), random_number() >> 32, kSuffix);
  Fd file(::openat(folder->get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return fail_errno(name);
  (void)::flock(file.get(), LOCK_EX | LOCK_NB);
  // All of it now: a page that can't be had later would end this process, as would a file that is larger than it may
  // be.
  const int error = largest_file() >= kSizes.bytes() ? allocate(file, kSizes.bytes()) : EFBIG;
  auto memory = error == 0 ? Mapping::of(file, kSizes.bytes()) : fail(ErrorCode::exhausted, "{}", std::strerror(error));
  if (!memory) {
    ::unlinkat(folder->get(), name.c_str(), 0);
    return fail(ErrorCode::exhausted, "{} of {}: {}", name, human_bytes(kSizes.bytes()), memory.error().message);
  }
  static const int watched = ::pthread_atfork(nullptr, nullptr, in_child);
  if (watched != 0) return fail(ErrorCode::exhausted, "pthread_atfork: {}", std::strerror(watched));
  const Rings rings(memory->span(), kSizes, describe(who));
  current.store(new Recording{std::move(file), std::move(*memory), rings}, std::memory_order_release);
  flight::record(Kind::opened, {.a = static_cast<std::uint64_t>(::getpid())}, program);
  return {};
}

void open(const std::string& directory, const std::string& who, const std::string& program) {
  if (directory == "off") return;
  static std::atomic<bool> said = false;
  if (const auto opened = try_open(directory, who, program); !opened && !said.exchange(true))
    logger().warn("no flight recording of this process in {}: {}", directory.empty() ? default_directory() : directory,
                  opened.error().message);
}

bool is_open() { return current.load(std::memory_order_relaxed) != nullptr; }

void beat() {
  Recording* const open = current.load(std::memory_order_acquire);
  if (open == nullptr) return;
  flight::record(Kind::beat, {.a = static_cast<std::uint64_t>(wall_ns())}, {});
  // What is written into mapped memory does not change the time by which clean() knows how old a recording is.
  constexpr std::int64_t minute = 60'000'000'000;
  static std::atomic<std::int64_t> touched = 0;
  if (const std::int64_t now = now_ns(); now - touched.load(std::memory_order_relaxed) > minute) {
    touched.store(now, std::memory_order_relaxed);
    (void)::futimens(open->file.get(), nullptr);
  }
}

void set_job(std::uint64_t job) {
  if (Recording* const open = current.load(std::memory_order_acquire); open != nullptr && job != 0)
    open->rings.set_job(job);
}

void record(Kind kind, const Numbers& numbers, std::string_view text) {
  if (Recording* const open = current.load(std::memory_order_acquire); open != nullptr)
    open->rings.put(kind, now_ns(), numbers, text);
}

}  // namespace rejoin::flight
