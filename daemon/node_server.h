// The daemon's shell on one node: the local socket of trainers, the coordinator's connection, the catch-up stream.
// All in the io_context's thread, but for the stream's own.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "base/fd.h"
#include "base/unix_socket.h"
#include "daemon/stream_thread.h"
#include "daemon/upstream.h"
#include "local.pb.h"
#include "membership/node.h"

namespace rejoin::daemon {

struct NodeOptions {
  std::string name = "node";
  std::string socket;             // where trainers connect
  std::string coordinator;        // host:port, or a relay's
  std::string transport = "shm";  // of the catch-up stream
  std::string data_listen = "127.0.0.1:0";
  std::string compression = "auto";  // of the catch-up stream: off, auto, always
  double stream_limit = 0;           // MB/s that it may use; 0: no limit
  std::chrono::milliseconds silence{2000};
};

class NodeServer {
 public:
  static Result<std::unique_ptr<NodeServer>> start(asio::io_context& io, const NodeOptions& options, const JobKey& key);
  ~NodeServer();
  nlohmann::json status() const;

 private:
  // The catch-up of all ranks whose state is on one device.
  struct DeviceStream {
    std::shared_ptr<device::Device> device;
    std::unique_ptr<StreamThread> thread;
    std::uint64_t bytes_served = 0;
    std::vector<std::pair<catchup::RankKey, catchup::Source::Stats>> serving;
  };
  // What a trainer registers with.
  struct Offering {
    proto::LocalHello hello;
    std::vector<Fd> fds;  // so far
  };
  struct Trainer {
    membership::RankConnection id;
    StreamThread* stream = nullptr;  // of its device, when it has registered
    Fd socket;
    PeerCredentials credentials;
    std::unique_ptr<asio::posix::stream_descriptor> readable;
    std::unique_ptr<asio::posix::stream_descriptor> exited;  // a pidfd
    std::optional<Offering> offering;                        // until it is whole
    std::optional<catchup::RankKey> key;
    bool catching_up = false;
    std::optional<Incarnation> serves;
    proto::Heartbeat ring;  // its last: what it counted of its all-reduces
  };

  NodeServer(asio::io_context& io, const NodeOptions& options, const JobKey& key);
  void accept();
  void watch(Trainer& trainer);
  void read(membership::RankConnection id);
  Result<> on_hello(Trainer& trainer, const proto::LocalHello& hello);
  Result<> on_descriptors(Trainer& trainer, std::vector<Fd> fds);
  void drop(membership::RankConnection id, const std::string& reason, membership::Node::Gone how);
  void on_hang_up(membership::RankConnection id, const std::string& reason);
  void tell(Trainer& trainer, const proto::ToTrainer& message);
  void tick();
  void carry_out(const membership::Node::Actions& actions);
  void follow_plan();
  // A trainer that has said all, until the device that its state is on has been opened.
  struct Waiting {
    membership::RankConnection from;
    Offering offering;
  };
  Result<> admit(Trainer& trainer, Offering offering, DeviceStream& stream);
  void refuse(membership::RankConnection id, const Error& error);
  Result<DeviceStream> open_stream(const std::string& device, const std::string& listen);  // any thread
  void on_opened(const std::string& device, Result<DeviceStream> opened);
  void on_report(const std::string& device, StreamThread::Report report);
  TimePoint now() const { return SteadyClock().now(); }

  asio::io_context& io_;
  const NodeOptions options_;
  const JobKey& key_;
  Fd listener_fd_;
  std::optional<SocketFile> socket_file_;
  asio::posix::stream_descriptor listener_;
  asio::steady_timer timer_;
  membership::Node machine_;
  std::map<membership::RankConnection, Trainer> trainers_;
  std::uint64_t next_trainer_ = 1;
  Upstream coordinator_;
  std::map<catchup::RankKey, catchup::Progress> progress_;
  std::uint64_t rejected_ = 0;
  catchup::Compression compression_{};
  std::map<std::string, DeviceStream> streams_;          // by the device's address
  std::map<std::string, std::vector<Waiting>> opening_;  // likewise
  asio::thread_pool opener_{1};                          // a GPU may take seconds, in which the daemon is not silent
};

}  // namespace rejoin::daemon
