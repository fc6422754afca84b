// After the coordinator's restart: what it waits for before it goes on without somebody who may have the state.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// The last contributor has ended. The joiner's ranks register, and that they have caught up comes later: their nodes
// stand still in between, or a segment was lost and is sent again.
TEST(Coordinator, AJoinerWhoseRanksHaveYetToSayWhereTheyStandIsWaitedFor) {
  for (const Duration late : {Duration(200ms), Duration(400ms), Duration(900ms), Duration(3s)}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.lose_the_contributor_of(first);
    bench.pass(1200ms, {10});
    bench.inbox.clear();
    bench.back_with(1, 0, 11, 2), bench.back_with(1, 1, 12, 2);
    bench.stand(1, 0, true, 11);
    bench.pass(late, {10, 11});
    EXPECT_FALSE(bench.evicted_anybody());
    if (late > bench.config.silence) bench.back_with(1, 1, 12, 2);  // it was taken for gone, and connects anew
    bench.stand(1, 1, true, 12);
    bench.pass(1s, {10, 11, 12});
    bench.expect_alone(1);
  }
}

// What it says is heard, and is not that.
TEST(Coordinator, AJoinerWhoseRanksHaveNotCaughtUpIsNotWaitedFor) {
  for (const bool silent : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.incarnations = first.incarnations;
    bench.back(0, 10), bench.back(1, 11, 2);
    bench.down(0);
    if (!silent) bench.stand(1, 0, false, 11);
    bench.pass(6s, {10, 11});
    EXPECT_TRUE(bench.coordinator.members().empty());
  }
}

}  // namespace
}  // namespace rejoin::membership
