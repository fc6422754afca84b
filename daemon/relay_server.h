// A relay's shell: daemons on one side, the coordinator on the other. All in the io_context's thread.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "daemon/coordinators.h"
#include "daemon/node_listener.h"
#include "membership/relay.h"

namespace rejoin::daemon {

class RelayServer {
 public:
  // `coordinator`: host:port of each, with commas between. Errors: the address to listen on is in use, or is a
  // coordinator's.
  static Result<std::unique_ptr<RelayServer>> start(asio::io_context& io, const std::string& name,
                                                    const std::string& listen, const std::string& coordinator,
                                                    std::chrono::milliseconds silence, const JobKeys& keys);
  const std::string& address() const { return nodes_.address(); }
  nlohmann::json status() const;

 private:
  RelayServer(asio::io_context& io, const std::string& name, const std::string& coordinator,
              std::chrono::milliseconds silence, const JobKeys& keys);
  void tick();
  void carry_out(const membership::Relay::Actions& actions);
  TimePoint now() const { return SteadyClock().now(); }

  const std::chrono::milliseconds silence_;
  asio::steady_timer timer_;
  membership::Relay machine_;
  std::uint64_t rejected_ = 0;
  NodeListener nodes_;
  Coordinators coordinators_;
};

}  // namespace rejoin::daemon
