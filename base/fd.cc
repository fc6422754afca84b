#include "base/fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "base/children.h"
#include "base/fail.h"
#include "base/no_cancel.h"
#include "base/no_signals.h"
#include "base/populate.h"

namespace rejoin {

Fd::Fd(int fd) : fd_(fd) {
  if (fd < 0 || fd > STDERR_FILENO) return;
  fd_ = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(fd);
  errno = error;
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  const NoCancel no_cancel;
  children::forget(fd_);
  ::close(fd_);
  fd_ = -1;
}

// Without O_CLOEXEC, as standard descriptors are. In a root directory without /dev another file that takes nothing.
void open_standard_descriptors() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    int opened = ::open("/dev/null", O_RDWR);
    if (opened < 0) opened = ::open("/", O_PATH);
    if (opened > STDERR_FILENO) return;
  }
}

Result<Fd> duplicate(int fd) {
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) return fail_errno(fmt::format("another descriptor of {}", fd));
  return copy;
}

bool without_descriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

Result<Fd> make_eventfd() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) return fail_errno("eventfd");
  return fd;
}

Result<Fd> make_pidfd(int pid) {
  Fd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!fd) return fail_errno(fmt::format("pidfd_open({})", pid));
  return fd;
}

void signal_eventfd(const Fd& fd) {
  const std::uint64_t one = 1;
  const NoCancel no_cancel;
  // EAGAIN means the counter is full: the reader is signalled already.
  const auto written = ::write(fd.get(), &one, sizeof one);
  REJOIN_CHECK(written == sizeof one || errno == EAGAIN, "eventfd write: errno {}", errno);
}

void drain_eventfd(const Fd& fd) {
  std::uint64_t count = 0;
  const auto got = ::read(fd.get(), &count, sizeof count);
  REJOIN_CHECK(got == sizeof count || errno == EAGAIN || errno == EINTR, "eventfd read: errno {}", errno);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
    file_ = std::move(other.file_);
  }
  return *this;
}

namespace {

// The shareable mappings of this process, by address.
struct Shareable {
  std::size_t size = 0;
  int fd = -1;
  std::uint64_t inode = 0;
};
struct Shareables {
  std::mutex mutex;
  std::map<const std::byte*, Shareable> by_address;
};
// Never destroyed: a session may be a static object, which is destroyed after all that it has made.
Shareables& shareables() {
  alignas(Shareables) static std::byte memory[sizeof(Shareables)];
  static auto& all = *new (memory) Shareables;
  return all;
}

}  // namespace

void Mapping::reset() {
  if (file_) {
    const std::lock_guard lock(shareables().mutex);
    shareables().by_address.erase(base_);
  }
  if (base_ != nullptr) ::munmap(base_, size_);
  base_ = nullptr;
  file_.reset();
}

Result<Mapping> Mapping::shareable(std::size_t size) {
  auto fd = make_sealed_memfd("rejoin", round_up(size, 4 * KiB));
  if (!fd) return tl::unexpected(fd.error());
  auto mapping = of(*fd, size);
  if (!mapping) return mapping;
  if (auto shared = mapping->share(std::move(*fd)); !shared) return tl::unexpected(shared.error());
  return mapping;
}

Result<Mapping> Mapping::shareable_of(const Fd& fd, std::size_t size) {
  constexpr std::size_t kWorthADescriptor = 1 * MiB;
  auto mapping = of(fd, size);
  if (!mapping || size < kWorthADescriptor) return mapping;
  if (auto own = duplicate(fd.get()))
    if (auto shared = mapping->share(std::move(*own)); !shared) return tl::unexpected(shared.error());
  return mapping;
}

// Puts it among the shareable ones.
Result<> Mapping::share(Fd file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return fail_errno("fstat");
  file_ = std::move(file);
  const std::lock_guard lock(shareables().mutex);
  shareables().by_address[base_] = {size_, file_.get(), status.st_ino};
  return {};
}

std::optional<SharedFile> shared_file_of(std::span<const std::byte> memory) {
  const std::lock_guard lock(shareables().mutex);
  auto after = shareables().by_address.upper_bound(memory.data());
  if (after == shareables().by_address.begin()) return std::nullopt;
  const auto& [base, shareable] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(memory.data() - base);
  if (offset > shareable.size || memory.size() > shareable.size - offset) return std::nullopt;
  return SharedFile{shareable.fd, shareable.inode, offset, shareable.size};
}

namespace {

tl::unexpected<Error> unmapped(std::size_t size) {
  const std::string what = fmt::format("mapping {}", human_bytes(size));
  if (errno == ENOMEM)
    return fail(ErrorCode::exhausted,
                "{}: {}: raise the limit of this process's memory ('ulimit -v'), or that of its mappings "
                "(vm.max_map_count)",
                what, std::strerror(ENOMEM));
  if (errno != EAGAIN) return fail_errno(what);
  return fail(ErrorCode::exhausted,
              "{}: this process locks all of its memory (mlockall), and may lock no more: raise the limit with 'ulimit "
              "-l', or lock less",
              what);
}

}  // namespace

Result<Mapping> Mapping::of(const Fd& fd, std::size_t size, bool writable) {
  void* base = ::mmap(nullptr, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return unmapped(size);
  ::madvise(base, size, MADV_HUGEPAGE);  // where /sys/kernel/mm/transparent_hugepage/shmem_enabled says advise
  return Mapping(static_cast<std::byte*>(base), size);
}

Result<Mapping> Mapping::anonymous(std::size_t size) {
  // Aligned to a huge page, so that all of it can lie in huge ones: fewer faults and translations, quicker pinning.
  constexpr std::size_t huge = 2 * MiB;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // of arm64 4, 16 or 64 KiB
  const std::size_t length = round_up(size, page), slack = size >= huge ? huge : 0;
  void* base = ::mmap(nullptr, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return unmapped(size);
  auto* begin = static_cast<std::byte*>(base);
  if (slack > 0) {
    const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(begin) % huge;
    if (skipped > 0) ::munmap(begin, skipped);
    begin += skipped;
    if (slack > skipped) ::munmap(begin + length, slack - skipped);
  }
  ::madvise(begin, size, MADV_HUGEPAGE);  // refused: small pages
  return Mapping(begin, size);
}

Result<Fd> make_sealed_memfd(const std::string& name, std::size_t size) {
  if (largest_file() < size)
    return fail(ErrorCode::exhausted,
                "memfd '{}' of {}: a file of this process may have {}; raise it with 'ulimit -f unlimited'", name,
                human_bytes(size), human_bytes(largest_file()));
  // Where the sysctl vm.memfd_noexec is 2, kernels refuse those that do not ask for that; older ones don't know it.
  constexpr unsigned kNoExecSeal = 8, kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Fd fd(::memfd_create(name.c_str(), kFlags | kNoExecSeal));
  if (!fd && errno == EINVAL) fd = Fd(::memfd_create(name.c_str(), kFlags));
  const bool forbidden = !fd && (errno == ENOSYS || errno == EPERM || errno == EACCES);
  if (!fd) return fail_errno(forbidden ? "memfd_create (a filter of system calls has to allow it)" : "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    return fail_errno(fmt::format("memfd '{}' of {}", name, human_bytes(size)));
  if (auto had = reserve(fd, size); !had) return fail(had.error().code, "memfd '{}': {}", name, had.error().message);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return fail_errno("F_ADD_SEALS");
  return fd;
}

Result<std::size_t> sealed_size(const Fd& fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  constexpr int wanted = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & wanted) != wanted)
    return fail(ErrorCode::refused, "descriptor is not a memfd sealed against resizing");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return fail_errno("fstat");
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace rejoin
