// Sleeping on several descriptors as one.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::transport {

// Errors: the kernel has a bound for what all processes of a user watch together.
inline Result<> add_to(const Fd& epoll, int fd, epoll_event event) {
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0) return {};
  if (errno != ENOSPC) return fail_errno("epoll_ctl");
  return fail(ErrorCode::exhausted,
              "the kernel watches no more connections of this user's; raise the sysctl fs.epoll.max_user_watches");
}

// The epoll becomes readable when `fd` is.
inline Result<> add_to(const Fd& epoll, int fd) { return add_to(epoll, fd, {.events = EPOLLIN, .data = {.fd = fd}}); }

// Before a descriptor is closed that a child of fork() may have, too: the epoll would go on reporting it.
inline void remove_from(const Fd& epoll, int fd) { (void)::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, fd, nullptr); }

// Ends a connection or a listener that the epoll watches, for both its sides. A child of fork() may have its
// descriptor, too: closed only here, the connection would stay up, and the epoll would go on reporting it. In such a
// child, which is not `owner`, it stays up.
inline void hang_up(const Fd& epoll, Fd& socket, pid_t owner) {
  if (::getpid() == owner) {
    remove_from(epoll, socket.get());
    (void)::shutdown(socket.get(), SHUT_RDWR);
  }
  socket.reset();
}

}  // namespace rejoin::transport
