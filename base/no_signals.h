// Signals are for the threads of the program that uses this library.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdint>
#include <initializer_list>

namespace rejoin {

// Threads that begin while this lives take no signals, but for errors of their own.
class NoSignals {
 public:
  NoSignals() {
    sigset_t none;
    ::sigfillset(&none);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) ::sigdelset(&none, own);
    ::pthread_sigmask(SIG_BLOCK, &none, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

// The bytes that a file of this process may have; one that grows beyond them has SIGXFSZ sent to it.
inline std::uint64_t largest_file() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// While it lives, a file that this thread may not let grow (RLIMIT_FSIZE) is an error, EFBIG, and no SIGXFSZ, which
// ends a process unless it says otherwise.
class NoFileSizeSignal {
 public:
  NoFileSizeSignal() {
    ::sigemptyset(&this_);
    ::sigaddset(&this_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &this_, &before_);
  }
  ~NoFileSizeSignal() {
    constexpr timespec now{};
    while (::sigismember(&before_, SIGXFSZ) == 0 && ::sigtimedwait(&this_, nullptr, &now) == SIGXFSZ) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoFileSizeSignal(const NoFileSizeSignal&) = delete;

 private:
  sigset_t this_, before_;
};

}  // namespace rejoin
