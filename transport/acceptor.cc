#include "transport/acceptor.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::transport {

namespace {
std::atomic<std::uint64_t> without{0};
}

std::uint64_t accepts_without_descriptor() { return without.load(std::memory_order_relaxed); }

Fd Acceptor::next(const Fd& epoll, const Fd& listener, TimePoint now) {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const int why = errno;
  if (socket || !without_descriptors(why)) return socket;
  without.fetch_add(1, std::memory_order_relaxed);
  if (without_descriptors_.may_say(now))
    logger().warn("no data connection can be accepted: {}; raise the limit with 'ulimit -n'", std::strerror(why));
  listen(epoll, listener, false);
  again_ = now + kWithoutDescriptors;
  return {};
}

void Acceptor::dropped(const Error& why, TimePoint now) {
  if (dropped_.may_say(now)) logger().warn("a data connection that came is dropped: {}", why.message);
}

void Acceptor::look(const Fd& epoll, const Fd& listener, TimePoint now) {
  if (!again_ || now < *again_) return;
  again_.reset();
  listen(epoll, listener, true);
}

void Acceptor::listen(const Fd& epoll, const Fd& listener, bool listens) const {
  epoll_event event{.events = listens ? std::uint32_t{EPOLLIN} : 0u, .data = {.u64 = tag_}};
  REJOIN_CHECK(::epoll_ctl(epoll.get(), EPOLL_CTL_MOD, listener.get(), &event) == 0, "epoll_ctl: {}",
               std::strerror(errno));
}

}  // namespace rejoin::transport
