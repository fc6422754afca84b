// What a node's trainers are sent, and do not read, or can't be sent.
#include <gtest/gtest.h>

#include <algorithm>

#include "daemon/tests/one_node.h"

namespace rejoin::daemon {
namespace {

TEST_F(OneNode, TellsATrainerThatStandsForAMomentMoreOfItsPeersThanItsSocketTakes) {
  start(std::chrono::seconds(20));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  for (int i = 0; i < 20; ++i) tell_of_peers();
  proto::ToNode last;
  last.mutable_waits()->set_why("all that came before it");
  coordinator.send(node, last.SerializeAsString());
  io.run_for(milliseconds(500));  // the trainer stands
  int complete = 0;
  bool waits = false;
  EXPECT_TRUE(comes_true([&] {
    while (const auto heard = trainer.hear()) {
      EXPECT_TRUE(heard->has_control()) << heard->DebugString();
      if (heard->control().has_peers() && !heard->control().peers().more()) ++complete;
      if (heard->control().has_waits()) waits = true;
      if (waits) return true;
    }
    return trainer.hung_up();
  }));
  EXPECT_TRUE(waits);
  EXPECT_EQ(complete, lists);
}

TEST_F(OneNode, PutsOutATrainerThatSendsAndReadsNothingForASilence) {
  start(std::chrono::seconds(1));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  for (int i = 0; i < 20; ++i) tell_of_peers();
  proto::ToNode sign;
  sign.mutable_heartbeat();
  TimePoint signed_at{};
  EXPECT_TRUE(comes_true([&] {
    if (!trainer.hung_up() && trainer.unread() == 0) trainer.say(heartbeat());
    if (const TimePoint now = SteadyClock().now(); now - signed_at > milliseconds(50)) {
      signed_at = now;
      coordinator.send(node, sign.SerializeAsString());
    }
    return down() != reports.end();
  }));
  ASSERT_NE(down(), reports.end());
  EXPECT_EQ(down()->rank_down().reason(), "it has read nothing for 1000 ms");
}

// Of more than any system lets a socket hold; one that lacked it would wait for what was in it.
TEST_F(OneNode, PutsOutATrainerThatCanNotBeToldSomething) {
  start(std::chrono::seconds(20));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  proto::ToNode message;
  message.mutable_waits()->set_why(std::string(12 * MiB, 'w'));
  coordinator.send(node, message.SerializeAsString());
  EXPECT_TRUE(comes_true([&] { return trainer.hung_up() && down() != reports.end(); }));
  ASSERT_NE(down(), reports.end());
  EXPECT_EQ(down()->rank_down().reason(), "a message could not be sent to it: Message too long");
}

}  // namespace
}  // namespace rejoin::daemon
