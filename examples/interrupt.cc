#include "examples/interrupt.h"

#include <signal.h>

#include <cstring>

namespace rejoin::demo {

namespace {
volatile sig_atomic_t came = 0;
}  // namespace

void catch_interrupts() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = [](int number) { came = number; };
    action.sa_flags = SA_RESTART;
    (void)::sigaction(signal, &action, nullptr);
  }
}

int interrupted() { return came; }

Result<> unless_interrupted() {
  if (const int signal = interrupted(); signal != 0)
    return fail(ErrorCode::cancelled, "interrupted by SIG{}", ::sigabbrev_np(signal));
  return {};
}

}  // namespace rejoin::demo
