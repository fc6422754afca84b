#include "base/populate.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/bytes.h"
#include "base/fail.h"

namespace rejoin {

namespace {

tl::unexpected<Error> cannot_be_had(std::size_t size, const char* why) {
  return fail(ErrorCode::exhausted,
              "{} of shared memory can't be had ({}): where vm.overcommit_memory is 2, CommitLimit in /proc/meminfo "
              "says how much there is; raise vm.overcommit_ratio, add swap, or make the state smaller",
              human_bytes(size), why);
}

bool overcommits() {
  int how = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> how;  // without /proc: as nearly everywhere
  return how != 2;
}

}  // namespace

Result<> populate(std::span<std::byte> memory) {
  if (memory.empty() || ::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE) == 0) return {};
  switch (errno) {
    case EFAULT: return cannot_be_had(memory.size(), "touching it is a bus error");
    case ENOMEM:
    case EHWPOISON: return cannot_be_had(memory.size(), std::strerror(errno));
    default: return {};
  }
}

int allocate(const Fd& file, std::size_t size) {
  std::size_t most = 16 * MiB;  // a signal undoes at most so much, and others may come as fast as a piece takes
  for (std::size_t at = 0; at < size;) {
    const std::size_t piece = std::min(most, size - at);
    const int error = ::posix_fallocate(file.get(), static_cast<off_t>(at), static_cast<off_t>(piece));
    if (error == 0) at += piece;
    else if (error == EINTR) most = std::max(most / 2, 64 * KiB);
    else return error;
  }
  return 0;
}

Result<> reserve(const Fd& memfd, std::size_t size) {
  if (overcommits()) return {};
  const int error = allocate(memfd, size);
  return error == 0 ? Result<>() : cannot_be_had(size, std::strerror(error));
}

}  // namespace rejoin
