// Transactions in an etcd cluster, over gRPC. Only etcd_client.cc and etcd_channel.cc know gRPC; built without them,
// create() says so.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "etcd.pb.h"
#include "membership/store.h"

namespace asio {
class io_context;
}

namespace rejoin::daemon {

struct EtcdOptions {
  std::vector<std::string> endpoints;        // HOST:PORT
  std::string prefix;                        // of all keys, e.g. "/rejoin/JOB/"
  std::string ca_file, cert_file, key_file;  // PEM. TLS where there is a CA, or a certificate of our own with its key
  std::string user, password;
  // The password once more, where etcd has refused the one before. None: it stays.
  std::function<Result<std::string>()> read_password;
  // Of each try. Where most members are late it doubles, until it is the longest, and then is twice what an answer
  // took.
  std::chrono::milliseconds deadline{250}, longest{8000};
  // Called with the reason where gRPC has not let go of a call for long after it was cancelled, and to end this process
  // helps. Without it such a try has failed like others.
  std::function<void(const std::string&)> stuck;
};

// All of it runs in the io_context's thread; what gRPC's threads hear is posted there.
class EtcdClient {
 public:
  // Connects to nobody yet. Errors: `invalid_argument`, `io`: an endpoint or a file that can't be used; `exhausted`:
  // the system does not give gRPC its threads.
  static Result<std::unique_ptr<EtcdClient>> create(asio::io_context& io, const EtcdOptions& options);
  // Waits until gRPC has let go of what was under way, which is cancelled; its `done` is not called. What it does not
  // let go of within seconds stays its own until the process ends.
  virtual ~EtcdClient() = default;

  // One at a time. `done` is called once, later; it may destroy the client, or begin the next. Each endpoint is tried
  // once, from the one on that answered last, until one says what became of the transaction, which so may be done
  // several times. Errors:
  //   unavailable  none of them said it
  //   refused      etcd won't do it before somebody has changed something, and the message says what
  //   not_found    it reads as of a revision that etcd has no more
  using Done = std::function<void(Result<etcd::TxnResponse>)>;
  virtual void transact(const etcd::TxnRequest& transaction, Done done) = 0;
  // Of a transaction under way whose last try has not ended three seconds after it was cancelled for being late.
  virtual std::optional<membership::Store::Overdue> overdue() const { return std::nullopt; }
  // How much the member that answered last, or else the first endpoint's, holds; not while a transaction is under way.
  // Errors: `unavailable`.
  virtual void status(std::function<void(Result<etcd::StatusResponse>)> done) = 0;
};

}  // namespace rejoin::daemon
