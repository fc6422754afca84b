// Signals are for the threads of the program that uses this library.
#pragma once

#include <pthread.h>
#include <signal.h>

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

}  // namespace rejoin
