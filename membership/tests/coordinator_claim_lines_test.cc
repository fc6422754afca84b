// What is logged of who asks for a place that is taken.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

proto::FromNode first_rank(std::uint64_t instance, std::uint64_t daemon) {
  auto message = Bench::introduction(1, 0, instance);
  auto& its = *message.mutable_rank_up();
  its.set_daemon(daemon);
  its.set_node("node" + std::to_string(daemon));
  its.set_pid(static_cast<std::int32_t>(daemon));
  return message;
}

// Of a supervisor that starts a second one again and again the log is to have one line a minute of each sort.
TEST(Coordinator, LinesOfWhoAsksForAPlaceAgainAreAlikeThoughTheirNumbersDiffer) {
  Bench job;
  for (std::uint32_t r : {0u, 2u}) job.up(r);
  job.send(1, first_rank(1, 501));
  std::vector<Note> notes;
  for (std::uint64_t again = 0; again < 2; ++again) {
    proto::FromNode lives;
    lives.mutable_alive()->set_replica(1);
    lives.mutable_alive()->set_instance(100);
    lives.mutable_alive()->set_silent_ms(7 + again);
    for (const auto& [node, message] : {std::pair{9u, first_rank(2 + again, 509 + again)}, {1u, lives}}) {
      const auto actions = job.coordinator.on_message(NodeId(node), message, job.now);
      ASSERT_EQ(actions.notes.size(), 1u);
      notes.push_back(actions.notes[0]);
      job.keep(actions);
    }
  }
  EXPECT_NE(job.refusal(9), "");
  for (const std::size_t i : {0u, 1u}) {
    EXPECT_NE(notes[i].text, notes[i + 2].text);
    EXPECT_EQ(notes[i].like, notes[i + 2].like);
    EXPECT_NE(notes[i].like, "");
  }
  EXPECT_NE(notes[0].like, notes[1].like);
}

}  // namespace
}  // namespace rejoin::membership
