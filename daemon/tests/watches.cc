// Stands in for one of the C library's functions, in libraries too: what a program exports comes first.
#include "daemon/tests/watches.h"

#include <dlfcn.h>
#include <sys/epoll.h>

#include <cerrno>

namespace {
thread_local int left = 0;  // until the one that is not given; 0: all are
thread_local bool refused = false;
}  // namespace

extern "C" int epoll_ctl(int epoll, int operation, int descriptor, epoll_event* event) noexcept {
  using Own = int(int, int, int, epoll_event*);
  static auto* own = reinterpret_cast<Own*>(::dlsym(RTLD_NEXT, "epoll_ctl"));
  if (operation != EPOLL_CTL_ADD || left == 0 || --left > 0) return own(epoll, operation, descriptor, event);
  refused = true;
  errno = ENOSPC;
  return -1;
}

namespace rejoin::test {

NoWatch::NoWatch(int which) { left = which, refused = false; }
NoWatch::~NoWatch() { left = 0; }
bool NoWatch::has_come() { return refused; }

}  // namespace rejoin::test
