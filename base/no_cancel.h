// Threads of the program that uses this library may be cancelled (pthread_cancel).
#pragma once

#include <pthread.h>

namespace rejoin {

// While it lives its thread is not cancelled. That comes as an unwinding out of a call that waits, of write() and
// close() too, and no destructor and nothing that is noexcept lets it through: the process would abort. Any thread, and
// a signal's handler.
class NoCancel {
 public:
  NoCancel() { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancel() { ::pthread_setcancelstate(before_, nullptr); }
  NoCancel(const NoCancel&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace rejoin
