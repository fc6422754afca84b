#include "base/children.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
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

// Only what may be called there: no lock, no memory. The number stays taken, since who has it will close it; where this
// process may have no descriptor more, the first of them makes room.
void in_child() {
  const int before = errno;
  int unconnected = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool spare = unconnected >= 0;
  for (std::size_t word = 0; word < used.load(std::memory_order_relaxed); ++word)
    for (std::uint64_t bits = kept[word].exchange(0, std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      const int fd = static_cast<int>(word) * kBits + std::countr_zero(bits);
      if (unconnected < 0) {
        ::close(fd);
        unconnected = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (unconnected < 0) return;
        spare = unconnected != fd;
      }
      if (unconnected != fd) (void)::dup3(unconnected, fd, O_CLOEXEC);
    }
  if (spare) ::close(unconnected);
  errno = before;
}

}  // namespace

void keep_from(const Fd& socket) {
  static const int watched = ::pthread_atfork(nullptr, nullptr, in_child);
  REJOIN_CHECK(watched == 0, "pthread_atfork: {}", watched);
  const int fd = socket.get();
  if (fd < 0 || fd >= kDescriptors) return;
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
