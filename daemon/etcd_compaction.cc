// A snapshot takes several transactions: one that looks at the head of the one before, one for each fragment, and one
// that writes the new head and deletes what that makes superfluous. Fragments count for nothing before their head is
// there. Each transaction compares the leader with the token, and the head with what it was at first: so nothing is
// written by a former leader, or late into what is complete. The last one also compares the fragments with what was
// written here: a repeated put that came late, of other bytes, is found. Whatever was left behind by a compaction that
// was given up is deleted by the next one. An entry of the log that goes with it is in the last one.
#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/etcd_request.h"

namespace rejoin::daemon {

using membership::StoreRequest;

namespace {

// etcd takes 1.5 MiB in a request, and 128 comparisons in a transaction.
constexpr std::size_t kFragmentBytes = 512 * KiB, kMostFragments = 120;

class Compaction final : public EtcdRequest {
 public:
  using EtcdRequest::EtcdRequest;
  void begin() override {
    written_.clear();
    etcd::TxnRequest transaction;
    compare_leader(transaction, keys_, request_);
    add_range(*transaction.mutable_success(), keys_.leader());
    add_range(*transaction.mutable_success(), keys_.head());
    add_range(*transaction.mutable_failure(), keys_.leader());
    transact(transaction, [this](const etcd::TxnResponse& answer) {
      take_leader(answer.responses(0));
      if (!answer.succeeded()) return finish(Outcome::refused);
      head_written_ = log_from_ = 0;
      for (const auto& found : answer.responses(1).response_range().kvs()) {
        etcd::SnapshotHead head;
        if (!parse_head(found.value(), head)) return;
        if (head.position() >= request_.position) return finish(Outcome::done);  // by an earlier try
        head_written_ = static_cast<std::uint64_t>(found.mod_revision());
        log_from_ = head.position();
      }
      if (fragments() > kMostFragments)
        return unknown(fmt::format("a snapshot of {} MiB is too large for etcd: at most {} MiB",
                                   request_.value.size() / MiB, kMostFragments * kFragmentBytes / MiB));
      next();
    });
  }

 private:
  void next() {
    etcd::TxnRequest transaction;
    compare_leader(transaction, keys_, request_);
    compare_written(transaction, keys_.head(), head_written_);
    const bool last = written_.size() == fragments();
    if (last) finish_with(transaction);
    else
      add_put(*transaction.mutable_success(), fragment(written_.size()),
              request_.value.substr(written_.size() * kFragmentBytes, kFragmentBytes));
    add_range(*transaction.mutable_success(), keys_.leader());
    add_range(*transaction.mutable_failure(), keys_.leader());
    transact(transaction, [this, last](const etcd::TxnResponse& answer) {
      take_leader(answer.responses(answer.responses_size() - 1));
      if (!answer.succeeded() && answer_.leader_revision != request_.token) return finish(Outcome::refused);
      if (!answer.succeeded())
        return begin_again("etcd did what it was asked before only after what it was asked then");
      if (last) return finish(Outcome::done);
      written_.push_back(static_cast<std::uint64_t>(answer.header().revision()));
      next();
    });
  }
  void finish_with(etcd::TxnRequest& transaction) const {
    for (std::size_t i = 0; i < written_.size(); ++i) compare_written(transaction, fragment(i), written_[i]);
    etcd::SnapshotHead head;
    head.set_position(request_.position);
    head.set_bytes(request_.value.size());
    head.set_fragments(static_cast<std::uint32_t>(fragments()));
    auto& ops = *transaction.mutable_success();
    add_put(ops, keys_.head(), head.SerializeAsString());
    if (!request_.entry.empty()) add_put(ops, keys_.entry(request_.entry_at), request_.entry);
    add_delete(ops, keys_.entry(0), keys_.entry(request_.whole ? request_.position : log_from_));
    add_delete(ops, keys_.fragments(), fragment(0));
    add_delete(ops, fragment(fragments()), keys_.fragments_end());
  }
  std::size_t fragments() const { return (request_.value.size() + kFragmentBytes - 1) / kFragmentBytes; }
  std::string fragment(std::size_t index) const { return keys_.fragment(request_.position, index); }

  std::uint64_t head_written_ = 0;      // the revision in which the head was written before; 0: there is none
  std::uint64_t log_from_ = 0;          // the records that the snapshot before stands for
  std::vector<std::uint64_t> written_;  // … in which the fragments were, so far
};

}  // namespace

std::unique_ptr<EtcdRequest> make_compaction(EtcdClient& client, EtcdKeys keys, const StoreRequest& request,
                                             EtcdRequest::Done done) {
  return std::make_unique<Compaction>(client, std::move(keys), request, std::move(done));
}

}  // namespace rejoin::daemon
