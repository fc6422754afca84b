// Takes those who connect to a listening socket. Where this process has no descriptor left for one, the kernel keeps
// who waits, and epoll would wake the engine for them at once, for ever: then the socket is not looked at for a while.
#pragma once

#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/seldom.h"

namespace rejoin::transport {

// How often an acceptor of this process has found no descriptor for who calls. It may have been one look too many,
// behind the last who called; where it goes on somebody waits. Any thread.
std::uint64_t accepts_without_descriptor();

class Acceptor {
 public:
  // `tag`: of the listener's events in the epoll set that it is in.
  explicit Acceptor(std::uint64_t tag) : tag_(tag) {}
  // A socket that does not block; none: nobody connects, or there is no descriptor for it.
  Fd next(const Fd& epoll, const Fd& listener, TimePoint now);
  // Of one that came and can't be taken up: says why.
  void dropped(const Error& why, TimePoint now);
  bool waits() const { return again_.has_value(); }  // for a descriptor
  // To be called while it waits.
  void look(const Fd& epoll, const Fd& listener, TimePoint now);

 private:
  void listen(const Fd& epoll, const Fd& listener, bool listens) const;

  const std::uint64_t tag_;
  std::optional<TimePoint> again_;
  Seldom without_descriptors_{kSameLineAgain}, dropped_{kSameLineAgain};  // lines in the log
};

}  // namespace rejoin::transport
