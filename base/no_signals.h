// Signals are for the threads of the program that uses this library.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <cerrno>
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

// While it lives, what this thread can't write is an error: EFBIG where a file may not grow (RLIMIT_FSIZE), EPIPE where
// nobody reads a pipe any more; and no SIGXFSZ or SIGPIPE, which end a process unless it says otherwise.
class NoSignalsOfWriting {
 public:
  NoSignalsOfWriting() {
    sigset_t both;
    ::sigemptyset(&both);
    for (const int one : {SIGXFSZ, SIGPIPE}) ::sigaddset(&both, one);
    ::pthread_sigmask(SIG_BLOCK, &both, &before_);
    ::sigemptyset(&new_);
    for (const int one : {SIGXFSZ, SIGPIPE})
      if (::sigismember(&before_, one) == 0) ::sigaddset(&new_, one);
  }
  ~NoSignalsOfWriting() {
    const int error = errno;
    constexpr timespec now{};
    while (::sigtimedwait(&new_, nullptr, &now) > 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  NoSignalsOfWriting(const NoSignalsOfWriting&) = delete;

 private:
  sigset_t new_, before_;  // blocked by this
};

}  // namespace rejoin
