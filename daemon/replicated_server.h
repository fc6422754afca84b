// The shell of one of several coordinators (membership/replicated_coordinator.h): connections of daemons, the store
// that the coordinators share, the copy of its decisions on this one's disk, the clock. All in the io_context's thread,
// but for the copy's own.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "daemon/coordinator_report.h"
#include "daemon/job_history.h"
#include "daemon/log_copy.h"
#include "daemon/node_listener.h"
#include "daemon/versions_report.h"
#include "membership/replicated_coordinator.h"

namespace rejoin::daemon {

class ReplicatedServer {
 public:
  struct Options {
    std::string name;  // of its node, for people
    std::string listen;
    // The address that others are told, of the one that it listens on.
    std::function<std::string(const std::string&)> advertised = [](const std::string& listening) { return listening; };
    membership::JobConfig job;
    std::uint64_t per_snapshot = 1024;     // records
    std::string log_directory;             // of the copy
    std::uint64_t log_compact = 64 * MiB;  // bytes of the copy from which on it begins anew, with a snapshot
    std::uint32_t log_archives = 0;        // how many of what it leaves then are kept; 0: all
    membership::Disk disk = membership::Disk::real();
    std::string kind;  // of the store, and where it is: for the status
    std::vector<std::string> endpoints;
    std::function<void(const Error&)> failed;  // it can't take part; none: the process ends
  };
  // Errors name the thing and the remedy (port in use, a copy of another kind).
  static Result<std::unique_ptr<ReplicatedServer>> start(asio::io_context& io, Options options,
                                                         std::unique_ptr<membership::Store> store, const JobKeys& keys);
  ~ReplicatedServer();
  const std::string& address() const { return nodes_.address(); }
  const membership::ReplicatedCoordinator& machine() const { return *machine_; }
  nlohmann::json status() const;
  const JobHistory& history() const { return history_; }
  void set_page(std::string address) { page_ = std::move(address); }  // where this process's page is, before any node

 private:
  ReplicatedServer(asio::io_context& io, Options options, std::unique_ptr<membership::Store> store,
                   LogCopy::Handle copy, const JobKeys& keys);
  void tick();
  void carry_out(membership::ReplicatedCoordinator::Actions actions);
  void tell_of_lead();
  void compact_copy();
  void remember(const membership::ReplicatedCoordinator::Actions& actions);
  TimePoint now() const { return SteadyClock().now(); }

  asio::steady_timer timer_;
  const Options options_;
  const LogCopy::Handle copy_;
  std::uint64_t compact_at_ = options_.log_compact;             // bytes
  std::uint64_t compacting_ = 0;                                // its bytes when its thread was told to; 0: it is done
  std::unique_ptr<membership::ReplicatedCoordinator> machine_;  // once it listens
  NodeListener nodes_;
  JobHistory history_{options_.job.replicas};
  VersionsLog versions_;
  std::uint64_t writes_ = 0;  // of them, in the history
  std::string page_;
  bool leads_ = false;  // as the events say
  bool failed_ = false;
  const std::shared_ptr<bool> lives_ = std::make_shared<bool>(true);
  std::unique_ptr<membership::Store> store_;
};

}  // namespace rejoin::daemon
