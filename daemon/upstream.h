// The connection to the coordinator (or to a relay, which looks the same): made, proved, and made again for as long as
// its owner lives. Neither being made nor being proved may take longer than the silence: the system itself would try a
// connection that met a cut link again after ever longer pauses. All in the io_context's thread.
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
    std::function<bool()> over;      // the job is finished: a coordinator that ends has no more to do
    std::function<void()> rejected;  // bytes that are no message came, and were ignored
  };
  Upstream(asio::io_context& io, std::string address, const JobKey& key, std::chrono::milliseconds silence,
           Handlers handlers)
      : io_(io),
        address_(std::move(address)),
        key_(key),
        silence_(silence),
        handlers_(std::move(handlers)),
        retry_(io),
        deadline_(io) {}
  ~Upstream();
  void connect();
  void send(const proto::FromNode& message);
  // A coordinator that is silent is as good as gone: connects anew if it was last heard too long ago.
  void check(TimePoint heard);
  const std::string& address() const { return address_; }

 private:
  void lost(const std::string& why);

  asio::io_context& io_;
  const std::string address_;
  const JobKey& key_;
  const std::chrono::milliseconds silence_;
  const Handlers handlers_;
  asio::steady_timer retry_, deadline_;
  std::shared_ptr<Framed> connection_;
  bool up_ = false, said_unreachable_ = false;
};

}  // namespace rejoin::daemon
