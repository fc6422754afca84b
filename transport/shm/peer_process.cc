#include "transport/shm/peer_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/fail.h"

namespace rejoin::transport::shm {

namespace {

constexpr std::uint64_t kBytesPerCall = 16 * MiB;  // of one process_vm call

// A process goes by the number of its first thread. Where that one has ended, and others have not, it has neither
// memory nor files, and what is asked for is to be had from the others. `had` says whether it is.
template <typename Had>
void find_at_threads(pid_t process, const std::string& what, Had had) {
  if (had(fmt::format("/proc/{}/{}", process, what))) return;
  std::error_code error;
  for (std::filesystem::directory_iterator thread(fmt::format("/proc/{}/task", process), error), end;
       !error && thread != end; thread.increment(error))
    if (had(fmt::format("{}/{}", thread->path().string(), what))) return;
}

}  // namespace

std::string named(pid_t process) {
  return process == 0 ? "a process of another PID namespace" : fmt::format("process {}", process);
}

tl::unexpected<Error> unreadable(pid_t process) {
  if (errno == ESRCH && process != 0) return fail(ErrorCode::unavailable, "{} has ended", named(process));
  if (errno == EFAULT || errno == EIO)  // the latter of its file
    return fail_errno(
        fmt::format("reading the memory of {} (it is not mapped there, or what it is read into is not mapped here, or "
                    "not any more, or a device's own: memory has to stay mapped until it is deregistered)",
                    named(process)));
  return fail_errno(
      fmt::format("reading the memory of {} (both must run as one user in one PID namespace, with process_vm_readv "
                  "allowed by seccomp, and the sysctl kernel.yama.ptrace_scope at 0 or 1; or use transport tcp)",
                  named(process)));
}

Result<> shows_itself() {
  if (::geteuid() == 0 || ::prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1) return {};
  return fail(ErrorCode::unavailable,
              "no other process may read this one's memory, since it has changed its user or group, or its program's "
              "file has capabilities or can't be read by its user: start it as that user, call "
              "prctl(PR_SET_DUMPABLE, 1) after the change, or use transport tcp");
}

bool PeerProcess::shows_file(int number) const {
  bool shown = false;
  find_at_threads(id_, fmt::format("fd/{}", number),
                  [&](const std::string& path) { return shown = ::access(path.c_str(), F_OK) == 0; });
  return shown;
}

Fd PeerProcess::open_file(int number) const {
  Fd file;
  find_at_threads(id_, fmt::format("fd/{}", number), [&](const std::string& path) {
    file = Fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // it may be anything by now
    return static_cast<bool>(file);
  });
  return file;
}

Result<> PeerProcess::read(std::uint64_t address, std::span<std::byte> target) {
  for (std::uint64_t done = 0; done < target.size();) {
    const std::uint64_t step = std::min(target.size() - done, kBytesPerCall);
    const iovec near{target.data() + done, step}, far{reinterpret_cast<void*>(address + done), step};
    const ssize_t moved = ::process_vm_readv(id_, &near, 1, &far, 1, 0);
    if (moved < 0 && errno == ESRCH) return read_file_of_memory(address + done, target.subspan(done));
    if (moved <= 0) return unreadable(id_);
    done += static_cast<std::uint64_t>(moved);
  }
  return {};
}

// That of a thread which has not ended. Once open it is the memory's, whatever becomes of the thread and its number.
Result<> PeerProcess::read_file_of_memory(std::uint64_t address, std::span<std::byte> target) {
  const auto take = [&](const Fd& memory) {
    return ::pread(memory.get(), target.data(), target.size(), static_cast<off_t>(address));
  };
  if (!memory_)
    find_at_threads(id_, "mem", [&](const std::string& path) {
      Fd memory(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      if (!memory || take(memory) <= 0) return false;  // of a thread that has ended, some kernels open what is empty
      memory_ = std::move(memory);
      return true;
    });
  while (!target.empty()) {
    const ssize_t moved = memory_ ? take(memory_) : 0;
    if (moved == 0) errno = ESRCH;  // all threads have ended
    if (moved <= 0) return unreadable(id_);
    target = target.subspan(static_cast<std::size_t>(moved));
    address += static_cast<std::uint64_t>(moved);
  }
  return {};
}

}  // namespace rejoin::transport::shm
