// Ctrl-C, SIGTERM and SIGHUP as a wish to end, which is looked at wherever the demo waits, or ends a session's waiting.
#pragma once

#include "base/result.h"

namespace rejoin {
class Session;
}

namespace rejoin::demo {

void catch_interrupts();  // once, from main; signals that are ignored already stay so (nohup)
int interrupted();        // the signal that has come; 0: none
// `cancelled` where one has come.
Result<> unless_interrupted();

// While it lives, and the session does, the signals interrupt this session as well. One at a time, of the thread that
// signals come to: catch_interrupts() was called there.
class Interruptible {
 public:
  explicit Interruptible(Session& session);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
};

}  // namespace rejoin::demo
