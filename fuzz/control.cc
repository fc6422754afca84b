#include <cstdlib>

#include "membership/coordinator.h"
#include "membership/log.h"
#include "membership/node.h"
#include "membership/rank.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

const JobConfig kJob{.replicas = 2, .ranks = 2, .batch = 3, .steps = 50, .silence = std::chrono::seconds(1)};

void must(bool condition) {
  if (!condition) std::abort();
}

// Whatever is sent to it, a coordinator's decisions follow from each other, and another that reads them goes on from
// the same place.
class Watched {
 public:
  explicit Watched(TimePoint now) { must(coordinator_.recover({}, now).has_value()); }
  Coordinator& operator*() { return coordinator_; }

  void check(const Actions& actions) {
    for (const auto& record : actions.append) {
      if (record.has_epoch()) {
        must(record.epoch().epoch() > epoch_);
        epoch_ = record.epoch().epoch();
        std::set<std::uint32_t> members;
        for (const auto& member : record.epoch().members())
          must(member.replica() < kJob.replicas && members.insert(member.replica()).second);
      }
      if (record.has_committed()) {
        must(record.committed().step() == committed_ + 1 && record.committed().epoch() == epoch_);
        committed_ = record.committed().step();
      }
      if (record.has_rolled_back()) {
        must(record.rolled_back().version() != committed_);
        committed_ = record.rolled_back().version();
      }
      log_.push_back(record);
    }
    must(coordinator_.epoch() == Epoch(epoch_) && coordinator_.committed() == Step(committed_));
    for (const auto& [nodes, message] : actions.send)
      must(!message.has_plan() || (message.plan().epoch() <= epoch_ && message.plan().committed() <= committed_));
  }

  void check_log(TimePoint now) const {
    must(audit(trained_by_step(log_)).repeated == 0);
    Coordinator again(kJob);
    must(again.recover(log_, now).has_value());
    must(again.epoch() == coordinator_.epoch() && again.committed() == coordinator_.committed());
    must(again.members().size() == coordinator_.members().size());
    must(again.ledger().held() == coordinator_.ledger().held());
  }

 private:
  Coordinator coordinator_{kJob};
  std::vector<proto::LogRecord> log_;
  std::uint64_t epoch_ = 0, committed_ = 0;
};

// A rank hears of later epochs and steps only, and trains what the plan gives it.
void hear(Rank& rank, const proto::Plan& plan) {
  const auto before = std::pair(rank.epoch(), rank.committed());
  const auto meaning = rank.on_plan(plan);
  const auto after = std::pair(rank.epoch(), rank.committed());
  must(after >= before || before.first == Epoch{});
  must(meaning == Rank::Meaning::nothing || after != before || before.first == Epoch{});
  must(meaning != Rank::Meaning::evicted || !rank.member());
  must(rank.member() || rank.batch().empty());
}

}  // namespace
}  // namespace rejoin::membership

// Messages, each with a length byte before it and one that says to whom and over which connection it comes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  using namespace rejoin::membership;
  TimePoint now{std::chrono::seconds(10)};
  Watched coordinator(now);
  Node node("n", kJob.silence, 1);
  Relay relay("r", kJob.silence);
  (void)relay.on_coordinator_up(now);
  Rank rank{ReplicaId(0)};
  coordinator.check((*coordinator).on_tick(now));
  while (size >= 2) {
    const std::size_t length = std::min<std::size_t>(data[0], size - 2);
    const std::uint8_t to = data[1];
    const void* bytes = data + 2;
    data += 2 + length;
    size -= 2 + length;
    const auto read = [&](auto& message) { return message.ParseFromArray(bytes, static_cast<int>(length)); };
    proto::FromNode report;
    proto::ToNode message;
    switch (to % 8) {
      case 0:
      case 1:
      case 2:
        if (!read(report)) break;
        coordinator.check((*coordinator).on_message(NodeId(to / 8 % 4), report, now));
        (void)relay.on_node_message(NodeId(to / 8 % 4), report, now);
        break;
      case 3:
        coordinator.check((*coordinator).on_node_lost(NodeId(to / 8 % 4), now));
        (void)relay.on_node_lost(NodeId(to / 8 % 4), now);
        break;
      case 4:
        now += std::chrono::milliseconds(to * 4);
        coordinator.check((*coordinator).on_tick(now));
        (void)node.on_tick(now);
        (void)relay.on_tick(now);
        (void)(*coordinator).waiting_for(now);
        break;
      case 5:
        if (!read(message)) break;
        (void)node.on_coordinator_message(message, now);
        (void)relay.on_coordinator_message(message, now);
        if (message.has_plan()) hear(rank, message.plan());
        if (message.has_registered()) rank.on_registered(Incarnation(message.registered().incarnation()));
        (void)rank.batch();
        break;
      case 6:
        if (read(report)) (void)node.on_rank_message(RankConnection(to / 8 % 4 + 1), report, now);
        break;
      default:
        if (to / 8 % 2 == 0)
          (void)node.on_rank_gone(RankConnection(to / 16 % 4 + 1), "gone", static_cast<Node::Gone>(to % 3));
        else (void)node.on_coordinator_up(now);
    }
  }
  coordinator.check_log(now);
  return 0;
}
