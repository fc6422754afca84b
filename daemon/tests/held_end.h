// A process that is at its end for as long as a test likes, as one is that gives gigabytes back: it has two threads,
// and the second is traced, so that the system keeps it, and does not say that the process has ended, until it is
// reaped.
#pragma once

#include <sched.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

namespace rejoin::test {

class HeldEnd {
 public:
  enum class First : std::uint8_t { stays, ends };  // its first thread, before it is killed
  explicit HeldEnd(
      First first, const std::function<void()>& begins = [] {}) {
    int ends[2];
    if (::pipe(ends) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) run(first, begins, ends[1]);
    ::close(ends[1]);
    if (::read(ends[0], &second_, sizeof second_) != sizeof second_) second_ = 0;
    ::close(ends[0]);
    traced_ = second_ > 0 && ::ptrace(PTRACE_SEIZE, second_, nullptr, nullptr) == 0;
  }
  ~HeldEnd() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    if (traced_) ::waitpid(second_, nullptr, __WALL);
    ::waitpid(pid_, nullptr, 0);
  }
  HeldEnd(const HeldEnd&) = delete;
  HeldEnd& operator=(const HeldEnd&) = delete;

  pid_t pid() const { return pid_; }
  bool traced() const { return traced_; }  // false: the system does not let this process do so
  void kill() const {
    ::kill(pid_, SIGKILL);
    siginfo_t ended;
    ::waitid(P_PID, static_cast<id_t>(second_), &ended, WEXITED | WNOWAIT | __WALL);
  }

 private:
  [[noreturn]] static void run(First first, const std::function<void()>& begins, int tells) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    begins();
    alignas(16) static char stack[64 << 10];
    const auto waits = [](void*) -> int {
      for (;;) ::pause();
    };
    const pid_t second =
        ::clone(waits, stack + sizeof stack,
                CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM, nullptr);
    (void)!::write(tells, &second, sizeof second);
    if (first == First::ends) ::syscall(SYS_exit, 0);
    for (;;) ::pause();
  }

  pid_t pid_ = 0, second_ = 0;
  bool traced_ = false;
};

}  // namespace rejoin::test
