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

// Members 0, 1, 2 of four gather to 1, and 0, which is done first, goes on to a configuration of all. What happens to
// the others' part is none of its doing, whoever dies or stops meanwhile.
class GroupConfigurationGrows : public testing::TestWithParam<const char*> {};

TEST_P(GroupConfigurationGrows, AndEndsNoOperationOfBeforeAmongThoseThatAreThere) {
  const std::string_view what = GetParam();
  int heard = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const std::size_t count = seed % 2 == 0 ? 10 : 100'000;
    Members members(4, seed);
    members.reconfigure(1, {0, 1, 2});
    std::vector<Floats> own, got(3, Floats(count));
    for (std::uint32_t m = 0; m < 3; ++m) own.push_back(numbers(m, count));
    const auto gather = [&](std::uint32_t m) {
      Call call{.kind = Collective::gather, .root = 1, .inputs = {bytes_in(own[m])}};
      if (m == 1)
        for (auto& one : got) call.outputs.push_back(bytes_in(one));
      return members.submit(m, call);
    };
    const auto root = gather(1), leaf = gather(0);
    members.expect_success({leaf});

    std::vector<Handle> handles;
    for (const auto& member : members.all) handles.push_back(member.handle);
    std::vector<Members::Work> grown;
    const auto grow = [&](std::uint32_t m) {
      const auto work = grown.emplace_back(std::make_shared<Members::Pending>());
      members.all[m].group->reconfigure(2, handles, m, members.clock.now() + 10s,
                                        [work](const Result<>& result) { work->result = result; });
    };
    if (what == "joiner first") grow(3);
    grow(0);
    for (auto steps = random() % 60; steps > 0; --steps) members.poll(), members.fabric.step();
    if (what == "joiner last") grow(3);
    if (what == "dies") {
      members.fabric.kill(*members.all[0].engine);
      members.all[0].stopped = true;
    }
    if (what == "stops") {
      members.fabric.stop(*members.all[0].engine);
      members.all[0].stopped = true;
    }
    members.run_for(std::chrono::milliseconds(random() % 50));
    const auto late = gather(2);
    const auto begun = members.clock.now();
    if (what == "dies") {
      // Its goodbye may be lost with it; then they hear that it is gone.
      ASSERT_TRUE(members.run({late, root}));
      EXPECT_LT(members.clock.now() - begun, 1s);
      EXPECT_EQ(late->result->has_value(), root->result->has_value());
      heard += root->result->has_value() ? 1 : 0;
      continue;
    }
    members.expect_success({late, root});
    for (std::uint32_t m = 0; m < 3; ++m) ASSERT_EQ(got[m], own[m]);
    if (what == "stops") {
      members.fabric.resume(*members.all[0].engine);
      members.all[0].stopped = false;
      grow(3);
    }
    grow(1), grow(2);
    members.expect_success(grown);
    std::vector<Floats> sums(4, Floats(count, 1.0f));
    std::vector<Members::Work> works;
    for (std::uint32_t m = 0; m < 4; ++m)
      works.push_back(members.submit(m, {.kind = Collective::all_reduce, .inputs = {bytes_in(sums[m])}}));
    members.expect_success(works);
    ASSERT_EQ(sums, std::vector<Floats>(4, Floats(count, 4.0f)));
    for (std::uint32_t m = 0; m < 4; ++m) members.all[m].group->leave();
    members.run_for(20ms);
    for (std::uint32_t m = 0; m < 4; ++m) EXPECT_TRUE(members.all[m].group->left());
  }
  EXPECT_TRUE(what != "dies" || heard > 0);
}

INSTANTIATE_TEST_SUITE_P(Each, GroupConfigurationGrows, testing::Values("joiner first", "joiner last", "dies", "stops"),
                         [](const auto& one) {
                           std::string name(one.param);
                           std::erase(name, ' ');
                           return name;
                         });

// Who does need it hears at once.
TEST(GroupConfiguration, WhoNeedsOneThatHasGoneOnIsToldSo) {
  Members members(3);
  members.everyone();
  Floats one(10);
  const auto waits = members.submit(0, {.kind = Collective::all_reduce, .inputs = {bytes_in(one)}});
  members.run_for(10ms);
  const auto again = members.begin_reconfigure(2, {1, 2});
  const auto begun = members.clock.now();
  members.expect_success(again);
  ASSERT_TRUE(members.run({waits}));
  EXPECT_LT(members.clock.now() - begun, 1s);
  ASSERT_FALSE(*waits->result);
  EXPECT_THAT(waits->result->error().message, HasSubstr("has left the process group"));
}

// One has all, has nothing to do and goes on, before another one has heard that all are here.
TEST(GroupConfiguration, OneThatGoesOnEndsNoConfigurationThatItHasHad) {
  int early = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Members members(3, seed);
    auto works = members.begin_reconfigure(1, {0, 1, 2});
    for (int i = 0; i < 10'000 && !works[2]->result; ++i) {
      for (const auto m : {2, 1, 0}) members.all[m].group->poll(members.clock.now());
      if (!members.fabric.step()) members.clock.advance(100us);
    }
    ASSERT_TRUE(works[2]->result && *works[2]->result);
    early += works[0]->result && works[1]->result ? 0 : 1;
    const std::vector<Handle> handles{members.all[2].handle};
    members.all[2].group->reconfigure(2, handles, 0, members.clock.now() + 10s, {});
    members.expect_success(works);
    Floats one(10, 1.0f), other(10);
    members.expect_success({members.submit(0, {.kind = Collective::send, .root = 1, .inputs = {bytes_in(one)}}),
                            members.submit(1, {.kind = Collective::receive, .root = 0, .inputs = {bytes_in(other)}})});
    EXPECT_EQ(other, one);
  }
  EXPECT_GT(early, 0);
}

}  // namespace
}  // namespace rejoin::collectives
