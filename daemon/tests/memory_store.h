// A store in memory that several coordinators of one process share (membership/store.h). Each request takes its time,
// is done at one moment, and the answer takes its time, too; it may be lost, and the whole store may stand still.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "control.pb.h"
#include "daemon/listen.h"
#include "membership/store.h"

namespace rejoin::daemon {

// What the store holds. It must outlive whoever uses it.
struct MemoryStoreData {
  std::uint64_t revision = 0, leader_revision = 0, alive_revision = 0, snapshot_position = 0, snapshot_revision = 0;
  std::string leader, snapshot;
  std::map<std::uint64_t, std::string> log;
  bool stands_still = false;  // nothing is done, and nobody is answered in time
  int lose_answers = 0;       // of so many writes that are done
  std::chrono::milliseconds each_way{1}, deadline{100};

  std::uint64_t end() const {                   // records
    if (log.empty()) return snapshot_position;  // of an import
    proto::LogEntry last;
    last.ParseFromString(log.rbegin()->second);
    return log.rbegin()->first + static_cast<std::uint64_t>(last.records_size());
  }
  membership::StoreAnswer carry_out(const membership::StoreRequest& request) {
    using Kind = membership::StoreRequest::Kind;
    using Outcome = membership::StoreAnswer::Outcome;
    membership::StoreAnswer answer{.outcome = Outcome::refused};
    const bool leads = request.token == leader_revision && request.leader == leader;
    switch (request.kind) {
      case Kind::read: read(request.position, answer); break;
      case Kind::claim:
        if (!leads) break;
        answer.outcome = Outcome::done;
        leader = request.value;
        leader_revision = ++revision;
        break;
      case Kind::append:
        if (auto there = log.find(request.position); there != log.end()) answer.existing = there->second;
        if (!leads || log.contains(request.position) || !has(request.behind)) break;
        answer.outcome = Outcome::done;
        log[request.position] = request.value;
        ++revision;
        break;
      case Kind::renew:
        if (!leads || !has(request.behind)) break;
        answer.outcome = Outcome::done;
        alive_revision = ++revision;
        break;
      case Kind::compact:
        if (!leads || snapshot_position >= request.position) break;
        answer.outcome = Outcome::done;
        snapshot = request.value;
        log.erase(log.begin(), log.lower_bound(request.whole ? request.position : snapshot_position));
        if (!request.entry.empty()) log[request.entry_at] = request.entry;
        snapshot_position = request.position;
        snapshot_revision = ++revision;
        break;
    }
    answer.leader_revision = leader_revision;
    answer.leader = leader;
    return answer;
  }

 private:
  bool has(const membership::StoreRequest::Behind& behind) const {
    if (behind.entry) return log.contains(*behind.entry);
    return behind.snapshot_revision == 0 || behind.snapshot_revision == snapshot_revision;
  }
  void read(std::uint64_t position, membership::StoreAnswer& answer) const {
    constexpr std::size_t most = 5;  // entries
    answer.outcome = membership::StoreAnswer::Outcome::done;
    answer.alive_revision = alive_revision;
    answer.snapshot_position = snapshot_position;
    answer.snapshot_revision = snapshot_revision;
    if (snapshot_position > position && !log.contains(position)) {
      answer.snapshot = snapshot;
      position = snapshot_position;
    }
    auto from = log.lower_bound(position);
    for (; from != log.end() && answer.entries.size() < most; ++from) answer.entries.emplace_back(*from);
    answer.more = from != log.end();
  }
};

class MemoryStore final : public membership::Store {
 public:
  MemoryStore(asio::io_context& io, MemoryStoreData& data) : io_(io), data_(data) {}
  ~MemoryStore() override { *lives_ = false; }
  void submit(const membership::StoreRequest& request, std::function<void(membership::StoreAnswer)> done) override {
    after(data_.each_way, [this, request, done = std::move(done)] {
      const bool reads = request.kind == membership::StoreRequest::Kind::read;
      const bool still = data_.stands_still;
      membership::StoreAnswer answer = still ? membership::StoreAnswer{} : data_.carry_out(request);
      const bool lost = !still && !reads && data_.lose_answers > 0 && data_.lose_answers-- > 0;
      if (lost) answer = {};
      if (still || lost) answer.error = "no endpoint answered in time";
      after(still || lost ? data_.deadline : data_.each_way, [done, answer] { done(answer); });
    });
  }

 private:
  void after(std::chrono::milliseconds delay, std::function<void()> call) {
    const auto timer = std::make_shared<asio::steady_timer>(io_, delay);
    timer->async_wait([timer, call = std::move(call), lives = lives_](asio::error_code) {
      if (*lives) call();
    });
  }
  asio::io_context& io_;
  MemoryStoreData& data_;
  const std::shared_ptr<bool> lives_ = std::make_shared<bool>(true);
};

}  // namespace rejoin::daemon
