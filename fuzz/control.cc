#include "membership/coordinator.h"
#include "membership/node.h"
#include "membership/rank.h"
#include "membership/relay.h"

// Messages, each with a length byte before it and one that says to whom and over which connection it comes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  using namespace rejoin::membership;
  TimePoint now{std::chrono::seconds(10)};
  Coordinator coordinator({.replicas = 2, .ranks = 2, .batch = 3, .steps = 50, .silence = std::chrono::seconds(1)});
  (void)coordinator.recover({}, now);
  Node node("n", std::chrono::seconds(1));
  Relay relay("r", std::chrono::seconds(1));
  (void)relay.on_coordinator_up(now);
  Rank rank(ReplicaId(0), 0);
  while (size >= 2) {
    const std::size_t length = std::min<std::size_t>(data[0], size - 2);
    const std::uint8_t to = data[1];
    const void* bytes = data + 2;
    data += 2 + length;
    size -= 2 + length;
    const auto read = [&](auto& message) { return message.ParseFromArray(bytes, static_cast<int>(length)); };
    proto::FromNode report;
    proto::ToNode word;
    switch (to % 8) {
      case 0:
      case 1:
      case 2:
        if (!read(report)) break;
        (void)coordinator.on_message(NodeId(to / 8 % 4), report, now);
        (void)relay.on_node_message(NodeId(to / 8 % 4), report, now);
        break;
      case 3:
        (void)coordinator.on_node_lost(NodeId(to / 8 % 4), now);
        (void)relay.on_node_lost(NodeId(to / 8 % 4), now);
        break;
      case 4:
        now += std::chrono::milliseconds(to * 4);
        (void)coordinator.on_tick(now);
        (void)node.on_tick(now);
        (void)relay.on_tick(now);
        (void)coordinator.waiting_for(now);
        break;
      case 5:
        if (!read(word)) break;
        (void)node.on_coordinator_message(word, now);
        (void)relay.on_coordinator_message(word, now);
        if (word.has_plan()) (void)rank.on_plan(word.plan());
        if (word.has_registered()) rank.on_registered(Incarnation(word.registered().incarnation()));
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
  return 0;
}
