#include "examples/interrupt.h"

#include <signal.h>

#include <atomic>

#include "base/fail.h"
#include "rejoin/session.h"

namespace rejoin::demo {

namespace {
volatile sig_atomic_t came = 0;
std::atomic<Session*> session_to_end = nullptr;
static_assert(std::atomic<Session*>::is_always_lock_free);

void on_signal(int number) {
  came = number;
  if (auto* session = session_to_end.load()) session->interrupt();
}
}  // namespace

void catch_interrupts() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
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

Interruptible::Interruptible(Session& session) {
  session_to_end = &session;
  if (interrupted() != 0) session.interrupt();  // it came before there was a session
}

Interruptible::~Interruptible() { session_to_end = nullptr; }

}  // namespace rejoin::demo
