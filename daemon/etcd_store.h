// The store of several coordinators (membership/store.h) in an etcd cluster. Its keys, all behind the job's prefix:
//   leader, alive   as there
//   log/N           an entry, by the number of its first record, of 20 digits
//   snapshot        a SnapshotHead: what the snapshot stands for, and how many fragments it has
//   snapshot/N/I    a fragment of it: etcd takes 1.5 MiB in one request
//
// What writes is one transaction, and no answer to it does not mean that it was not done: it is repeated at the next
// endpoint, and may so be done twice, or late. What it compares makes that harmless. A claim or an append that is
// refused may therefore have been done by an earlier try, even of the same submit(): who asked knows it by the bytes.
//
// A snapshot takes a transaction for each 512 KiB, and meanwhile nothing is appended. A second store with the same
// token may do it beside the first.
//
// etcd keeps what was overwritten and deleted until it is told otherwise, and stops to write when its quota (2 GiB by
// default) is used up. Run it with --auto-compaction-mode=periodic --auto-compaction-retention=1h or the like. This
// store does not tell it, because others who use the same etcd may need its history.
#pragma once

#include "daemon/etcd_client.h"
#include "membership/store.h"

namespace rejoin::daemon {

class EtcdRequest;

class EtcdStore final : public membership::Store {
 public:
  // Connects to nobody yet. Errors: as EtcdClient::create().
  static Result<std::unique_ptr<EtcdStore>> create(asio::io_context& io, EtcdOptions options);
  ~EtcdStore() override;
  void submit(const membership::StoreRequest& request, std::function<void(membership::StoreAnswer)> done) override;
  std::optional<Overdue> overdue() const override { return client_->overdue(); }

 private:
  EtcdStore(std::unique_ptr<EtcdClient> client, std::string prefix);

  const std::string prefix_;
  std::unique_ptr<EtcdRequest> under_way_;
  const std::unique_ptr<EtcdClient> client_;  // goes first: its callbacks are the request's
};

}  // namespace rejoin::daemon
