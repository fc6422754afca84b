// Members that die, stop, leave, come late or do something else, at any moment.
#include <gmock/gmock.h>

#include "collectives/tests/members.h"

namespace rejoin::collectives {
namespace {

using namespace std::chrono_literals;
using testing::AllOf, testing::HasSubstr, testing::Not;

Call all_reduce_of(Floats& floats) { return {.kind = Collective::all_reduce, .inputs = {bytes_in(floats)}}; }

// Whoever dies, and whenever: the others hear of it soon, and who it is, whatever it costs to withdraw memory; nothing
// lands in their memory afterwards, and they go on.
TEST(GroupFailure, OneThatDiesFailsEverythingAndTheOthersGoOnWithoutIt) {
  std::ptrdiff_t heard = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Members members(4, seed,
                    {.detection = seed % 4 >= 2 ? 100us : 1ms,
                     .spread = seed % 4 >= 2 ? 300us : 0us,
                     .late_writes = seed % 2 == 1,
                     .withdrawal_breaks = seed % 4 >= 2});
    members.everyone();
    const auto victim = static_cast<std::uint32_t>(random() % 4);
    const auto named = fmt::format("rank {0} (sim:{0}) is gone", victim);
    std::vector<Floats> buffers;
    for (std::uint32_t m = 0; m < 4; ++m) buffers.push_back(numbers(m, seed % 3 == 0 ? 1'000 : 300'000));
    std::vector<Members::Work> works;
    // Who hears that it has failed takes the memory for something else at once.
    for (std::uint32_t m = 0; m < 4; ++m) {
      const auto work = members.submit(m, all_reduce_of(buffers[m]));
      if (m == victim) continue;
      work->failed = [&buffer = buffers[m]] { std::ranges::fill(buffer, 3.0f); };
      works.push_back(work);
    }
    for (auto steps = random() % (seed % 3 == 0 ? 60 : 200); steps > 0; --steps) members.poll(), members.fabric.step();
    members.fabric.kill(*members.all[victim].engine);
    members.all[victim].stopped = true;
    const auto killed = members.clock.now();
    // Some may have all they need before; who hasn't, or who begins another, hears of it.
    ASSERT_TRUE(members.run(works));
    heard += std::ranges::count_if(works, [](const auto& work) { return !*work->result; });
    for (const auto& work : works)
      if (!*work->result) EXPECT_THAT(work->result->error().message, HasSubstr(named));
    std::vector<Floats> next;
    std::vector<std::uint32_t> left;
    for (std::uint32_t m = 0; m < 4; ++m)
      if (m != victim) left.push_back(m);
    for (std::uint32_t m = 0; m < 4; ++m) next.push_back(numbers(m, 5'000, 9));
    std::vector<Members::Work> more;
    for (const auto m : left) more.push_back(members.submit(m, all_reduce_of(next[m])));
    ASSERT_TRUE(members.run(more));
    for (const auto& work : more) {
      ASSERT_FALSE(*work->result);
      EXPECT_THAT(work->result->error().message, HasSubstr(named));
    }
    EXPECT_LT(members.clock.now() - killed, 100ms);
    for (std::size_t i = 0; i < works.size(); ++i)
      if (*works[i]->result) std::ranges::fill(buffers[left[i]], 3.0f);
    for (auto& buffer : next) std::ranges::fill(buffer, 4.0f);
    members.run_for(5ms);
    members.reconfigure(2, left);
    std::vector<Floats> after;
    for (std::uint32_t m = 0; m < 4; ++m) after.push_back(Floats(100'000, static_cast<float>(m + 1)));
    works.clear();
    for (const auto m : left) works.push_back(members.submit(m, all_reduce_of(after[m])));
    members.expect_success(works);
    for (const auto m : left) ASSERT_EQ(after[m], Floats(100'000, 10.0f - static_cast<float>(victim + 1)));
    for (const auto m : left) ASSERT_EQ(buffers[m], Floats(buffers[m].size(), 3.0f)) << "written after it had failed";
    for (const auto m : left) ASSERT_EQ(next[m], Floats(next[m].size(), 4.0f));
  }
  EXPECT_GT(heard, 0);
}

// A process that stops for as long as it likes, at any line, and goes on: the others have moved on without it.
TEST(GroupFailure, OneThatStopsIsTimedOutAndHarmsNobodyWhenItGoesOn) {
  std::ptrdiff_t heard = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Members members(3, seed,
                    {.late_writes = seed % 2 == 1, .lands_stopped = seed % 4 >= 2, .withdrawal_breaks = seed % 8 >= 4});
    members.everyone();
    const auto victim = static_cast<std::uint32_t>(random() % 3);
    std::vector<Floats> buffers(3);
    std::vector<Members::Work> works;
    Members::Work its;
    for (std::uint32_t m = 0; m < 3; ++m) {
      buffers[m] = numbers(m, 200'000);
      const auto work = members.submit(m, all_reduce_of(buffers[m]), m == (victim + 1) % 3 ? 1s : 3s);
      (m == victim ? its : works.emplace_back()) = work;
    }
    for (auto steps = 1 + random() % 60; steps > 0; --steps) members.poll(), members.fabric.step();
    if (its->result) continue;
    members.fabric.stop(*members.all[victim].engine);
    members.all[victim].stopped = true;
    ASSERT_TRUE(members.run(works));
    heard += std::ranges::count_if(works, [](const auto& work) { return !*work->result; });
    for (const auto& work : works)
      if (!*work->result)
        EXPECT_THAT(work->result->error().message, AllOf(HasSubstr("timed out"), Not(HasSubstr("is gone"))));
    std::vector<std::uint32_t> left;
    for (std::uint32_t m = 0; m < 3; ++m)
      if (m != victim) left.push_back(m);
    members.reconfigure(2, left);
    for (auto& buffer : buffers) std::ranges::fill(buffer, 5.0f);
    members.fabric.resume(*members.all[victim].engine);
    members.all[victim].stopped = false;
    std::vector<Floats> after(3, Floats(50'000, 1.0f));
    works.clear();
    for (const auto m : left) works.push_back(members.submit(m, all_reduce_of(after[m])));
    members.expect_success(works);
    for (const auto m : left) ASSERT_EQ(after[m], Floats(50'000, 2.0f));
    ASSERT_TRUE(members.run({its}));
    EXPECT_FALSE(*its->result);
    for (const auto m : left) ASSERT_EQ(buffers[m], Floats(200'000, 5.0f)) << "its bytes came after they had moved on";
    // And all three together again.
    members.reconfigure(3, {0, 1, 2});
    works.clear();
    after.assign(3, Floats(50'000, 1.0f));
    for (std::uint32_t m = 0; m < 3; ++m) works.push_back(members.submit(m, all_reduce_of(after[m])));
    members.expect_success(works);
    ASSERT_EQ(after, std::vector<Floats>(3, Floats(50'000, 3.0f)));
  }
  EXPECT_GT(heard, 20) << "of two in each of 40 jobs";
}

TEST(GroupFailure, ATimeOutSaysWhoIsWaitedFor) {
  Members members(3);
  members.everyone();
  Floats one(10), other(10);
  const auto first = members.submit(0, all_reduce_of(one), 1s), second = members.submit(1, all_reduce_of(other), 5s);
  ASSERT_TRUE(members.run({first, second}));
  ASSERT_FALSE(*first->result);
  EXPECT_EQ(first->result->error().code, ErrorCode::timeout);
  EXPECT_THAT(first->result->error().message,
              HasSubstr("all_reduce (sum) of 40 bytes of float32 waits for bytes from rank 2"));
  EXPECT_THAT(second->result->error().message, HasSubstr("rank 0 (sim:0) has given up: timed out"));
  const auto third = members.submit(2, {.kind = Collective::barrier});
  ASSERT_TRUE(members.run({third}));
  EXPECT_FALSE(*third->result) << "it has heard, too";
}

TEST(GroupFailure, DifferentCallsAreNamedOnBothSides) {
  for (const bool large : {false, true}) {
    Members members(2);
    members.everyone();
    Floats one(large ? 100'000 : 10), other(large ? 100'000 : 12);
    const auto first = members.submit(0, all_reduce_of(one));
    const auto second = members.submit(
        1, large ? Call{.kind = Collective::broadcast, .inputs = {bytes_in(other)}} : all_reduce_of(other));
    ASSERT_TRUE(members.run({first, second}));
    for (const auto& work : {first, second}) {
      ASSERT_FALSE(*work->result);
      EXPECT_EQ(work->result->error().code, ErrorCode::mismatch);
      EXPECT_THAT(work->result->error().message, HasSubstr("collective 1 of this process group is"));
      EXPECT_THAT(work->result->error().message, HasSubstr(large ? "broadcast" : "48 bytes"));
    }
  }
  Members members(2);
  members.everyone();
  Floats ten(10), twelve(12);
  const auto sent = members.submit(0, {.kind = Collective::send, .root = 1, .tag = 4, .inputs = {bytes_in(ten)}});
  const auto got = members.submit(1, {.kind = Collective::receive, .root = 0, .tag = 4, .inputs = {bytes_in(twelve)}});
  ASSERT_TRUE(members.run({sent, got}));
  EXPECT_THAT(sent->result->error().message,
              HasSubstr("receives 48 bytes in a message with tag 4, and rank 0 sends 40"));
  EXPECT_FALSE(*got->result);
}

// Who has nothing to do in a collective has ended it before it hears of others' bytes.
TEST(GroupFailure, NoBytesOnOneSideAreAMismatchToo) {
  for (const bool all_to_all : {false, true})
    for (const bool early : {false, true}) {
      SCOPED_TRACE(testing::Message() << all_to_all << early);
      Members members(2);
      members.everyone();
      Floats none, some(10), own(10), got(10);
      const auto without = [&] {
        Call call{.kind = Collective::all_to_all, .inputs = {{}, {}}, .outputs = {{}, {}}};
        return members.submit(0, all_to_all ? call : all_reduce_of(none));
      };
      const auto with = [&] {
        Call call{.kind = Collective::all_to_all,
                  .inputs = {bytes_in(some), bytes_in(own)},
                  .outputs = {bytes_in(got), bytes_in(own)}};
        return members.submit(1, all_to_all ? call : all_reduce_of(some));
      };
      const auto begun = members.clock.now();
      Members::Work first = early ? with() : without();
      members.run_for(2ms);
      Members::Work second = early ? without() : with();
      const auto& work = early ? first : second;  // the other may have ended well
      ASSERT_TRUE(members.run({first, second}));
      EXPECT_LT(members.clock.now() - begun, 1s) << "it heard, and was not timed out";
      ASSERT_FALSE(*work->result);
      EXPECT_EQ(work->result->error().code, ErrorCode::mismatch) << work->result->error().message;
      EXPECT_THAT(work->result->error().message, HasSubstr("all ranks call the same"));
    }
}

// Whoever expects nothing of another hears that there is something, and the other that nobody takes it.
TEST(GroupFailure, AnAllToAllOfBytesThatNobodyExpectsFailsAtOnceOnBoth) {
  Members members(3);
  members.everyone();
  std::array<Floats, 3> own{Floats(10), Floats(10), Floats(10)};
  Floats more(20);
  std::vector<Members::Work> works;
  for (const auto m : {0u, 1u, 2u}) {
    Call call{.kind = Collective::all_to_all, .inputs = {{}, {}, {}}, .outputs = {{}, {}, {}}};
    call.inputs[m] = call.outputs[m] = bytes_in(own[m]);
    if (m == 0) call.inputs[1] = bytes_in(more);
    works.push_back(members.submit(m, call));
  }
  const auto begun = members.clock.now();
  ASSERT_TRUE(members.run(works));
  EXPECT_LT(members.clock.now() - begun, 1s) << "it heard, and was not timed out";
  for (const auto m : {0u, 1u}) {
    ASSERT_FALSE(*works[m]->result);
    EXPECT_THAT(
        works[m]->result->error().message,
        AllOf(HasSubstr("receives 0 bytes in all_to_all, and rank 0 sends 80: all ranks call the same, with sizes"),
              HasSubstr("rank 1 (sim:1)")));
  }
}

// However many wait behind one that others are not at yet, they end one after the other, not one inside of the other.
TEST(GroupFailure, ManyWithoutBytesWaitBehindOneThatIsBlocked) {
  constexpr int kMany = 50'000;
  Members members(2);
  members.everyone();
  std::vector<Members::Work> works;
  Floats none;
  for (const auto m : {0u, 1u}) {
    for (std::uint32_t i = 0; i < 2; ++i) works.push_back(members.submit(m, {.kind = Collective::barrier}));
    for (int i = 0; i < kMany; ++i) works.push_back(members.submit(m, all_reduce_of(none)));
    works.push_back(members.submit(m, {.kind = Collective::barrier}));
  }
  members.expect_success(works);
}

TEST(GroupFailure, MembersComeToAConfigurationInAnyOrder) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Members members(4, seed);
    std::mt19937_64 random(seed);
    std::vector<std::uint32_t> order{0, 1, 2, 3};
    std::ranges::shuffle(order, random);
    std::vector<Handle> handles;
    for (const auto& member : members.all) handles.push_back(member.handle);
    std::vector<Members::Work> works;
    for (const auto m : order) {
      const auto work = works.emplace_back(std::make_shared<Members::Pending>());
      members.all[m].group->reconfigure(9, handles, m, members.clock.now() + 10s,
                                        [work](const Result<>& result) { work->result = result; });
      members.run_for(std::chrono::milliseconds(random() % 100));
    }
    members.expect_success(works);
  }
}

TEST(GroupFailure, WhoLeavesAfterTheLastOperationFailsNobody) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Members members(3, seed);
    members.everyone();
    std::vector<Floats> buffers;
    for (std::uint32_t m = 0; m < 3; ++m) buffers.push_back(numbers(m, seed % 2 == 0 ? 100 : 100'000));
    std::vector<Members::Work> works;
    for (std::uint32_t m = 0; m < 3; ++m) works.push_back(members.submit(m, all_reduce_of(buffers[m])));
    // Each leaves as soon as its own part is over.
    std::vector<bool> leaving(3), gone(3);
    for (int i = 0; i < 100'000 && gone != std::vector<bool>(3, true); ++i) {
      members.poll();
      for (std::uint32_t m = 0; m < 3; ++m) {
        if (gone[m]) continue;
        if (works[m]->result && !leaving[m]) members.all[m].group->leave(), leaving[m] = true;
        if (leaving[m] && members.all[m].group->left()) members.all[m].group.reset(), gone[m] = true;
      }
      if (!members.fabric.step()) members.clock.advance(1ms);
    }
    ASSERT_EQ(gone, std::vector<bool>(3, true));
    for (const auto& work : works) ASSERT_TRUE(*work->result) << work->result->error().message;
    EXPECT_EQ(buffers[1], buffers[0]);
    EXPECT_EQ(buffers[2], buffers[0]);
  }
}

TEST(GroupFailure, WhoNeedsOneThatHasLeftIsToldSo) {
  Members members(2);
  members.everyone();
  Floats one(10);
  const auto waits = members.submit(0, all_reduce_of(one));
  members.run_for(10ms);
  members.all[1].group->leave();
  ASSERT_TRUE(members.run({waits}));
  EXPECT_THAT(waits->result->error().message, HasSubstr("rank 1 (sim:1) has left the process group"));
  const auto refused = members.submit(1, {.kind = Collective::barrier});
  EXPECT_THAT(refused->result->error().message, HasSubstr("was shut down"));
}

// What becomes ready for a member only after that has left is not waited for.
TEST(GroupFailure, WhoComesToNeedOneThatHasLeftIsToldSo) {
  Members members(3);
  members.everyone();
  std::vector<Floats> buffers(3, Floats(100'000));
  const auto broadcast_of = [](Floats& floats) {
    return Call{.kind = Collective::broadcast, .inputs = {bytes_in(floats)}};
  };
  const auto early = members.submit(1, broadcast_of(buffers[1]));
  members.run_for(2ms);
  members.all[2].group->leave();
  members.run_for(2ms);
  const auto root = members.submit(0, broadcast_of(buffers[0]));
  const auto begun = members.clock.now();
  ASSERT_TRUE(members.run({early, root}));
  EXPECT_LT(members.clock.now() - begun, 1s);
  for (const auto& work : {early, root}) {
    ASSERT_FALSE(*work->result);
    EXPECT_THAT(work->result->error().message, HasSubstr("has left"));
  }
}

TEST(GroupFailure, WhoLeavesWhileOthersAreConfiguredEndsTheirWaiting) {
  Members members(3);
  members.all[2].stopped = true;  // it never comes
  const auto works = members.begin_reconfigure(1, {0, 1, 2});
  members.run_for(50ms);
  members.all[0].group->leave();
  const auto begun = members.clock.now();
  ASSERT_TRUE(members.run({works[0], works[1]}));
  EXPECT_LT(members.clock.now() - begun, 1s);
  ASSERT_FALSE(*works[1]->result);
  EXPECT_THAT(works[1]->result->error().message, HasSubstr("has left"));
}

TEST(GroupFailure, StrangersAndDamagedMessagesAreNotListenedTo) {
  Members members(2);
  auto stranger = members.fabric.make_engine();
  const auto said = as_bytes("who is there");
  const auto endpoint = stranger->connect(members.all[0].handle.address, said);
  ASSERT_TRUE(endpoint);
  members.everyone();
  Floats one(1'000, 1.0f), other(1'000, 2.0f);
  members.expect_success({members.submit(0, all_reduce_of(one)), members.submit(1, all_reduce_of(other))});
  EXPECT_EQ(one, other);
  bool closed = false;
  for (int i = 0; i < 1000 && !closed; ++i) {
    for (const auto& event : stranger->poll()) closed = closed || event.kind == transport::EventKind::closed;
    members.poll();
    if (!members.fabric.step()) members.clock.advance(1ms);
  }
  EXPECT_TRUE(closed);
}

}  // namespace
}  // namespace rejoin::collectives
