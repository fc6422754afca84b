// One request to an EtcdStore, from its first transaction to its answer. For EtcdStore only.
#pragma once

#include "daemon/etcd_client.h"
#include "membership/store.h"

namespace rejoin::daemon {

struct EtcdKeys {
  std::string prefix;

  std::string leader() const { return prefix + "leader"; }
  std::string alive() const { return prefix + "alive"; }
  std::string entry(std::uint64_t position) const;
  std::string entries_end() const { return prefix + "log0"; }  // '0' is what comes after '/'
  std::string head() const { return prefix + "snapshot"; }
  std::string fragment(std::uint64_t position, std::size_t index) const;
  std::string fragments() const { return prefix + "snapshot/"; }
  std::string fragments_end() const { return prefix + "snapshot0"; }
};

// One operation of a transaction, and what it compares.
using EtcdOps = google::protobuf::RepeatedPtrField<etcd::RequestOp>;
void add_put(EtcdOps& to, const std::string& key, const std::string& value);
void add_delete(EtcdOps& to, const std::string& from, const std::string& end);
etcd::RangeRequest& add_range(EtcdOps& to, const std::string& from, const std::string& end = "");
void compare_written(etcd::TxnRequest& in, const std::string& key, std::uint64_t revision);
// That `leader` is as the request says. An etcd that was made anew counts its revisions from 1 again.
void compare_leader(etcd::TxnRequest& in, const EtcdKeys& keys, const membership::StoreRequest& request);

class EtcdRequest {
 public:
  using Done = std::function<void(membership::StoreAnswer)>;
  // The client is to outlive it, and calls it back. It may be destroyed in `done`.
  static std::unique_ptr<EtcdRequest> make(EtcdClient& client, EtcdKeys keys, const membership::StoreRequest& request,
                                           Done done);
  EtcdRequest(EtcdClient& client, EtcdKeys keys, const membership::StoreRequest& request, Done done)
      : keys_(std::move(keys)), request_(request), client_(client), done_(std::move(done)) {}
  virtual ~EtcdRequest() = default;
  virtual void begin() = 0;

 protected:
  using Outcome = membership::StoreAnswer::Outcome;
  // `then` is called where etcd has answered; otherwise the request ends as unknown.
  void transact(const etcd::TxnRequest& transaction, std::function<void(const etcd::TxnResponse&)> then);
  // What somebody else changed meanwhile is begun again, a bounded number of times.
  void begin_again(const std::string& why);
  void take_leader(const etcd::ResponseOp& of);
  void finish(Outcome outcome);
  void unknown(std::string why);
  // Of a snapshot, as etcd has it. False: it is none, and the request has ended as unknown.
  bool parse_head(const std::string& value, etcd::SnapshotHead& head);

  const EtcdKeys keys_;
  const membership::StoreRequest request_;
  membership::StoreAnswer answer_;

 private:
  EtcdClient& client_;
  Done done_;
  int begun_again_ = 0;
};

std::unique_ptr<EtcdRequest> make_compaction(EtcdClient& client, EtcdKeys keys, const membership::StoreRequest& request,
                                             EtcdRequest::Done done);

}  // namespace rejoin::daemon
