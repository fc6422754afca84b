// The process at the other end of a connection, whose memory and files are read.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>

#include "base/fd.h"

namespace rejoin::transport::shm {

std::string named(pid_t process);  // 0: as the kernel names one of a PID namespace that is not seen from here
tl::unexpected<Error> unreadable(pid_t process);  // its memory, as errno says
// Whether others of this user may look at this process at all: who has changed its user, or whose program's file has
// capabilities, shows them neither memory nor files (ptrace(2), "Ptrace access mode checking"). Root is not asked.
Result<> shows_itself();

class PeerProcess {
 public:
  explicit PeerProcess(pid_t id = 0) : id_(id) {}
  pid_t id() const { return id_; }
  bool shows_file(int number) const;  // by its descriptor there
  Fd open_file(int number) const;     // to read; none: it can't be had just now
  Result<> read(std::uint64_t address, std::span<std::byte> target);

 private:
  Result<> read_file_of_memory(std::uint64_t address, std::span<std::byte> target);
  pid_t id_;
  Fd memory_;  // opened when it is needed
};

}  // namespace rejoin::transport::shm
