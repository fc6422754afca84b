// The coordinator's shell: connections of daemons, the durable log, the clock. All in the io_context's thread.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "daemon/coordinator_report.h"
#include "daemon/job_history.h"
#include "daemon/node_listener.h"
#include "daemon/versions_report.h"
#include "membership/coordinator.h"
#include "membership/log.h"

namespace rejoin::daemon {

class CoordinatorServer {
 public:
  struct LogOptions {
    std::string directory;
    std::uint64_t compact = 64 * MiB;  // bytes of the log from which on it is compacted
    std::uint32_t archives = 0;        // how many of those that it leaves are kept; 0: all
  };
  // Errors name the thing and the remedy (port in use, log of another job, full disk).
  static Result<std::unique_ptr<CoordinatorServer>> start(asio::io_context& io, const std::string& listen,
                                                          const LogOptions& log, const membership::JobConfig& job,
                                                          const JobKeys& keys);
  const std::string& address() const { return nodes_.address(); }
  nlohmann::json status() const;
  const JobHistory& history() const { return history_; }
  void set_page(std::string address) { page_ = std::move(address); }  // where this process's page is, before any node

 private:
  CoordinatorServer(asio::io_context& io, const membership::JobConfig& job, const JobKeys& keys, membership::Log log,
                    const LogOptions& options);
  void compact_log();
  void tick();
  void carry_out(const membership::Actions& actions);
  TimePoint now() const { return SteadyClock().now(); }

  asio::steady_timer timer_;
  const membership::JobConfig job_;
  membership::Log log_;
  const std::uint64_t log_compact_;
  std::uint64_t compact_at_ = log_compact_;  // bytes
  const std::uint32_t log_archives_;
  membership::Coordinator machine_;
  NodeListener nodes_;
  WriteTimes written_;
  VersionsLog versions_;
  JobHistory history_{job_.replicas};
  std::string page_;
};

}  // namespace rejoin::daemon
