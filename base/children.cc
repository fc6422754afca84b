#include "base/children.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>

#include "base/fail.h"

namespace rejoin::children {

namespace {

constexpr int kBits = 64, kDescriptors = 1 << 20;  // larger ones stay up: systems allow no more, as a rule

// A bit for each descriptor, so that a child can read them whatever other threads did when it was made.
std::array<std::atomic<std::uint64_t>, kDescriptors / kBits> kept{};
std::atomic<std::size_t> used{0};  // words that may have a bit
std::atomic<int> forks{0};

std::uint64_t inode_of(int socket) {
  struct stat file {};
  return ::fstat(socket, &file) == 0 && S_ISSOCK(file.st_mode) ? file.st_ino : 0;
}

// A socket without a connection, which takes the place of all: made beforehand, since a child may have no descriptor
// left, or may not make any.
struct Unconnected {
  std::atomic<int> fd{-1};
  std::atomic<std::uint64_t> inode{0};
  // A program that closes what is not its own may have another file there by now.
  bool there() const { return fd >= 0 && inode_of(fd) == inode; }
  ~Unconnected() {  // as this library is unloaded
    if (there()) ::close(fd.exchange(-1));
  }
} unconnected;

void make_unconnected() {
  if (unconnected.fd >= 0) return;
  Fd made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int none = -1;
  if (!made || !unconnected.fd.compare_exchange_strong(none, made.get())) return;
  unconnected.inode = inode_of(made.release());
}

// Only what may be called there: no lock, no memory, no new descriptor. A number stays taken, since who has it will
// close it. Where that can't be, as above a limit that has been lowered since, nobody else gets it either, as a rule.
void in_child() {
  const int before = errno;
  forks.fetch_add(1, std::memory_order_relaxed);
  const bool there = unconnected.there();
  for (std::size_t word = 0; word < used.load(std::memory_order_relaxed); ++word)
    for (std::uint64_t bits = kept[word].exchange(0, std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      const int fd = static_cast<int>(word) * kBits + std::countr_zero(bits);
      if (!there || ::dup3(unconnected.fd, fd, O_CLOEXEC) < 0) ::close(fd);
    }
  errno = before;
}

void watch() {
  static const int watched = ::pthread_atfork(nullptr, nullptr, in_child);
  REJOIN_CHECK(watched == 0, "pthread_atfork: {}", watched);
}

}  // namespace

int generation() {
  watch();
  return forks.load(std::memory_order_relaxed);
}

void keep_from(const Fd& socket) {
  watch();
  const int fd = socket.get();
  if (fd < 0 || fd >= kDescriptors) return;
  make_unconnected();
  const auto word = static_cast<std::size_t>(fd / kBits);
  kept[word].fetch_or(std::uint64_t{1} << (fd % kBits), std::memory_order_relaxed);
  for (std::size_t known = used; known <= word && !used.compare_exchange_weak(known, word + 1);) {
  }
}

void forget(int fd) {
  if (fd < 0 || fd >= kDescriptors) return;
  auto& word = kept[static_cast<std::size_t>(fd / kBits)];
  const std::uint64_t bit = std::uint64_t{1} << (fd % kBits);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) word.fetch_and(~bit, std::memory_order_relaxed);
}

}  // namespace rejoin::children
