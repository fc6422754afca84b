// Configurations that are late, given up by one, or broken while they are made.
#include <gmock/gmock.h>

#include "collectives/tests/members.h"

namespace rejoin::collectives {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

TEST(GroupConfiguration, AConnectionThatBreaksBeforeItIsAcceptedIsMadeAgain) {
  for (int steps = 0; steps < 8; ++steps) {
    SCOPED_TRACE(steps);
    Members members(2);
    const auto works = members.begin_reconfigure(1, {0, 1});
    for (int i = 0; i < steps; ++i) members.all[0].group->poll(members.clock.now()), members.fabric.step();
    members.fabric.reset(*members.all[1].engine, 0);
    members.expect_success(works);
  }
}

// One gives a configuration up while another one's welcome is on its way, for whom all are here.
TEST(GroupConfiguration, WhoHasAConfigurationThatAnotherHasGivenUpHearsOfIt) {
  int halves = 0;
  for (auto limit = 0us; limit < 600us; limit += 3us) {
    SCOPED_TRACE(limit.count());
    Members members(2);
    const auto given_up = members.clock.now() + limit;
    const std::vector<Handle> handles{members.all[0].handle, members.all[1].handle};
    std::array<std::optional<Result<>>, 2> configured;
    for (const std::uint32_t m : {0u, 1u})
      members.all[m].group->reconfigure(1, handles, m, m == 0 ? given_up : given_up + 10s,
                                        [&, m](const Result<>& result) { configured[m] = result; });
    members.run_for(2ms);
    ASSERT_TRUE(configured[0].has_value());
    if (*configured[0] || !configured[1] || !*configured[1]) continue;
    ++halves;
    const auto asked = members.clock.now();
    const auto barrier = members.submit(1, {.kind = Collective::barrier});
    ASSERT_TRUE(members.run({barrier}));
    ASSERT_FALSE(*barrier->result);
    EXPECT_THAT(barrier->result->error().message, HasSubstr("lacks rank 1"));
    EXPECT_LT(members.clock.now() - asked, 1s) << "it waits for its limit";
  }
  EXPECT_GT(halves, 0);
}

TEST(GroupConfiguration, AConfigurationThatLacksSomeoneSaysWhom) {
  Members members(3);
  members.all[2].stopped = true;
  const auto works = members.begin_reconfigure(4, {0, 1, 2}, 1s);
  ASSERT_TRUE(members.run({works[0], works[1]}));
  for (const auto& work : {works[0], works[1]}) {
    ASSERT_FALSE(*work->result);
    EXPECT_EQ(work->result->error().code, ErrorCode::timeout);
    EXPECT_THAT(work->result->error().message, HasSubstr("configuration 4 of 3 members lacks rank 2"));
  }
  // It comes late to that one, and all to the next.
  members.all[2].stopped = false;
  const auto again = members.begin_reconfigure(5, {2, 1, 0}, 1s);
  ASSERT_TRUE(members.run(again));
  for (const auto& work : again) ASSERT_TRUE(*work->result) << work->result->error().message;
  EXPECT_EQ(members.all[0].group->rank(), 2u);
}

}  // namespace
}  // namespace rejoin::collectives
