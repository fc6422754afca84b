// The coordinator's shell: connections of daemons, the durable log, the clock. All in the io_context's thread.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "daemon/framed.h"
#include "membership/coordinator.h"
#include "membership/log.h"

namespace rejoin::daemon {

class CoordinatorServer {
 public:
  // Errors name the thing and the remedy (port in use, log of another job, full disk).
  static Result<std::unique_ptr<CoordinatorServer>> start(asio::io_context& io, const std::string& listen,
                                                          const std::string& log_directory,
                                                          const membership::JobConfig& job, const JobKey& key);
  std::string address() const { return address_; }
  nlohmann::json status() const;
  std::uint64_t rejected() const { return rejected_; }
  const membership::Coordinator& machine() const { return machine_; }

 private:
  CoordinatorServer(asio::io_context& io, const membership::JobConfig& job, const JobKey& key, membership::Log log)
      : io_(io), acceptor_(io), timer_(io), job_(job), key_(key), log_(std::move(log)), machine_(job) {}
  void accept();
  void tick();
  void carry_out(const membership::Actions& actions);
  TimePoint now() const { return SteadyClock().now(); }

  asio::io_context& io_;
  asio::ip::tcp::acceptor acceptor_;
  asio::steady_timer timer_;
  const membership::JobConfig job_;
  const JobKey& key_;
  membership::Log log_;
  membership::Coordinator machine_;
  std::map<membership::NodeId, std::shared_ptr<Framed>> nodes_;
  std::uint64_t next_node_ = 1, rejected_ = 0;
  std::string address_;
};

}  // namespace rejoin::daemon
