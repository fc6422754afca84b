// Sleeping on several descriptors as one.
#pragma once

#include <sys/epoll.h>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::transport {

// The epoll becomes readable when `fd` is.
inline Result<> add_to(const Fd& epoll, int fd) {
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) return fail_errno("epoll_ctl");
  return {};
}

}  // namespace rejoin::transport
