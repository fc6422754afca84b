#include "daemon/etcd_request.h"

#include "base/fail.h"
#include "base/number.h"

namespace rejoin::daemon {

using membership::StoreAnswer;
using membership::StoreRequest;

namespace {

constexpr int kMostAgain = 3;
// Of an answer: an entry of 1,024 replicas has about 20 KB, a fragment of a snapshot 512 KiB.
constexpr int kEntriesAtOnce = 64, kFragmentsAtOnce = 4;

// Claim, append and renew are one transaction each.
class Write final : public EtcdRequest {
 public:
  using EtcdRequest::EtcdRequest;
  void begin() override {
    etcd::TxnRequest transaction;
    compare_leader(transaction, keys_, request_);
    compare_behind(transaction);
    add_put(*transaction.mutable_success(), key(), request_.value);
    add_range(*transaction.mutable_success(), keys_.leader());
    add_range(*transaction.mutable_failure(), keys_.leader());
    if (request_.kind == StoreRequest::Kind::append) {
      auto& absent = *transaction.add_compare();
      absent.set_target(etcd::Compare::CREATE);
      absent.set_key(key());
      absent.set_create_revision(0);
      add_range(*transaction.mutable_failure(), key());
    }
    transact(transaction, [this](const etcd::TxnResponse& answer) {
      take_leader(answer.responses(answer.succeeded() ? 1 : 0));
      if (answer.succeeded()) return finish(Outcome::done);
      if (request_.kind == StoreRequest::Kind::append)
        for (const auto& entry : answer.responses(1).response_range().kvs()) answer_.existing = entry.value();
      finish(Outcome::refused);
    });
  }

 private:
  void compare_behind(etcd::TxnRequest& in) const {
    const auto& behind = request_.behind;
    if (!behind.entry) {
      if (behind.snapshot_revision != 0) compare_written(in, keys_.head(), behind.snapshot_revision);
      return;
    }
    auto& there = *in.add_compare();
    there.set_target(etcd::Compare::CREATE);
    there.set_result(etcd::Compare::GREATER);
    there.set_key(keys_.entry(*behind.entry));
    there.set_create_revision(0);
  }
  std::string key() const {
    if (request_.kind == StoreRequest::Kind::claim) return keys_.leader();
    return request_.kind == StoreRequest::Kind::append ? keys_.entry(request_.position) : keys_.alive();
  }
};

// What follows the first transaction of a read is read as of its revision, so that all of it belongs together, whatever
// is written meanwhile. Only if etcd has compacted that revision, it is begun again.
class Read final : public EtcdRequest {
 public:
  using EtcdRequest::EtcdRequest;
  void begin() override {
    answer_ = {};
    head_.Clear();
    etcd::TxnRequest transaction;
    for (const std::string& key : {keys_.leader(), keys_.alive(), keys_.head()}) add(transaction, key);
    add(transaction, keys_.entry(request_.position), keys_.entries_end()).set_limit(kEntriesAtOnce);
    transact(transaction, [this](const etcd::TxnResponse& answer) { took(answer); });
  }

 private:
  etcd::RangeRequest& add(etcd::TxnRequest& to, const std::string& from, const std::string& end = "") {
    auto& range = add_range(*to.mutable_success(), from, end);
    range.set_serializable(!request_.recent);
    return range;
  }
  void took(const etcd::TxnResponse& answer) {
    take_leader(answer.responses(0));
    for (const auto& alive : answer.responses(1).response_range().kvs())
      answer_.alive_revision = static_cast<std::uint64_t>(alive.mod_revision());
    const auto& heads = answer.responses(2).response_range().kvs();
    if (!heads.empty() && !parse_head(heads[0].value(), head_)) return;
    if (!heads.empty()) answer_.snapshot_revision = static_cast<std::uint64_t>(heads[0].mod_revision());
    bool wants_snapshot = head_.position() > request_.position;
    const auto& entries = answer.responses(3).response_range();
    answer_.more = entries.more();
    for (const auto& entry : entries.kvs()) {
      std::uint64_t position = 0;
      const std::string log = keys_.prefix + "log/";
      if (!entry.key().starts_with(log) || !parse_number(std::string_view(entry.key()).substr(log.size()), position))
        return unknown(
            fmt::format("etcd has a key {}, which is none of Rejoin's; delete it, or use another prefix", entry.key()));
      // Where nothing follows on what the reader knows, that has gone into the snapshot. What is before that then is no
      // part of the log: appends that were repeated, done, compacted, and done again, since an endpoint was late.
      if (&entry == &entries.kvs(0) && position == request_.position) wants_snapshot = false;
      if (!wants_snapshot || position >= head_.position()) answer_.entries.emplace_back(position, entry.value());
    }
    answer_.snapshot_position = head_.position();
    if (!wants_snapshot) return finish(Outcome::done);
    revision_ = answer.header().revision();
    fragments_ = 0;
    read_fragments();
  }
  void read_fragments() {
    if (fragments_ == head_.fragments()) {
      if (answer_.snapshot.size() == head_.bytes()) return finish(Outcome::done);
      return incomplete();
    }
    etcd::TxnRequest transaction;
    auto& range = add(transaction, fragment(fragments_), fragment(head_.fragments()));
    range.set_limit(kFragmentsAtOnce);
    range.set_revision(revision_);
    transact(transaction, [this](const etcd::TxnResponse& answer) {
      const auto& read = answer.responses(0).response_range().kvs();
      for (const auto& found : read) {
        if (found.key() != fragment(fragments_)) return incomplete();
        ++fragments_;
        answer_.snapshot += found.value();
      }
      if (read.empty()) return incomplete();
      read_fragments();
    });
  }
  std::string fragment(std::size_t index) const { return keys_.fragment(head_.position(), index); }
  void incomplete() {
    unknown(
        fmt::format("the snapshot of {} records that etcd has as {} is not complete: somebody has deleted keys of it",
                    head_.position(), keys_.head()));
  }

  etcd::SnapshotHead head_;
  std::int64_t revision_ = 0;
  std::size_t fragments_ = 0;  // read so far
};

}  // namespace

std::string EtcdKeys::entry(std::uint64_t position) const { return fmt::format("{}log/{:020}", prefix, position); }

std::string EtcdKeys::fragment(std::uint64_t position, std::size_t index) const {
  return fmt::format("{}{:020}/{:04}", fragments(), position, index);
}

void add_put(EtcdOps& to, const std::string& key, const std::string& value) {
  auto& put = *to.Add()->mutable_request_put();
  put.set_key(key);
  put.set_value(value);
}

void add_delete(EtcdOps& to, const std::string& from, const std::string& end) {
  auto& range = *to.Add()->mutable_request_delete_range();
  range.set_key(from);
  range.set_range_end(end);
}

etcd::RangeRequest& add_range(EtcdOps& to, const std::string& from, const std::string& end) {
  auto& range = *to.Add()->mutable_request_range();
  range.set_key(from);
  range.set_range_end(end);
  return range;
}

void compare_written(etcd::TxnRequest& in, const std::string& key, std::uint64_t revision) {
  auto& compare = *in.add_compare();
  compare.set_target(etcd::Compare::MOD);
  compare.set_key(key);
  compare.set_mod_revision(static_cast<std::int64_t>(revision));
}

void compare_leader(etcd::TxnRequest& in, const EtcdKeys& keys, const StoreRequest& request) {
  compare_written(in, keys.leader(), request.token);
  if (request.leader.empty()) return;  // nobody has led
  auto& compare = *in.add_compare();
  compare.set_target(etcd::Compare::VALUE);
  compare.set_key(keys.leader());
  compare.set_value(request.leader);
}

std::unique_ptr<EtcdRequest> EtcdRequest::make(EtcdClient& client, EtcdKeys keys, const StoreRequest& request,
                                               Done done) {
  if (request.kind == StoreRequest::Kind::compact)
    return make_compaction(client, std::move(keys), request, std::move(done));
  if (request.kind == StoreRequest::Kind::read)
    return std::make_unique<Read>(client, std::move(keys), request, std::move(done));
  return std::make_unique<Write>(client, std::move(keys), request, std::move(done));
}

void EtcdRequest::transact(const etcd::TxnRequest& transaction, std::function<void(const etcd::TxnResponse&)> then) {
  client_.transact(transaction, [this, then = std::move(then)](Result<etcd::TxnResponse> answer) {
    if (answer) return then(*answer);
    if (answer.error().code == ErrorCode::not_found) return begin_again(answer.error().message);
    unknown(answer.error().message);
  });
}

void EtcdRequest::begin_again(const std::string& why) {
  if (++begun_again_ > kMostAgain) return unknown(fmt::format("{}, {} times", why, begun_again_));
  begin();
}

void EtcdRequest::take_leader(const etcd::ResponseOp& of) {
  answer_.leader.clear();
  answer_.leader_revision = 0;
  for (const auto& leader : of.response_range().kvs()) {
    answer_.leader = leader.value();
    answer_.leader_revision = static_cast<std::uint64_t>(leader.mod_revision());
  }
}

void EtcdRequest::finish(Outcome outcome) {
  answer_.outcome = outcome;
  const Done done = std::move(done_);
  done(std::move(answer_));  // and this is gone
}

void EtcdRequest::unknown(std::string why) {
  answer_ = {};
  answer_.error = std::move(why);
  finish(Outcome::unknown);
}

// There is none of nothing, as which an empty value would be read.
bool EtcdRequest::parse_head(const std::string& value, etcd::SnapshotHead& head) {
  if (head.ParseFromString(value) && head.position() > 0) return true;
  unknown(fmt::format("what etcd has as {} is none of Rejoin's snapshots", keys_.head()));
  return false;
}

}  // namespace rejoin::daemon
