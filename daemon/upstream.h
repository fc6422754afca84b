// The connection to the coordinator (or to a relay, which looks the same): made, proved, and made again for as long as
// its owner lives. All in the io_context's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "control.pb.h"
#include "daemon/framed.h"

namespace rejoin::daemon {

class Upstream {
 public:
  struct Handlers {
    std::function<void()> up;
    std::function<void(const proto::ToNode&)> message;
    std::function<void()> down;      // it is tried again
    std::function<void()> rejected;  // bytes that are no message came, and were ignored
  };
  Upstream(asio::io_context& io, std::string address, const JobKey& key, Handlers handlers)
      : io_(io), address_(std::move(address)), key_(key), handlers_(std::move(handlers)), retry_(io) {}
  ~Upstream();
  void connect();
  void send(const proto::FromNode& message);
  // A coordinator that is silent is as good as gone: connects anew if it was last heard too long ago.
  void check(TimePoint heard, Duration silence);
  const std::string& address() const { return address_; }

 private:
  void lost(const std::string& why);

  asio::io_context& io_;
  const std::string address_;
  const JobKey& key_;
  const Handlers handlers_;
  asio::steady_timer retry_;
  std::shared_ptr<Framed> connection_;
  bool up_ = false, said_unreachable_ = false;
};

}  // namespace rejoin::daemon
