// What comes over one rail before what another has brought: messages, the end of a link, the withdrawal of a write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "transport/tests/striped_cluster.h"

namespace rejoin::transport::striped {
namespace {

using testing::ElementsAre;

constexpr Options kSlowToRetry = [] {
  Options options = kOptions;
  options.stall = options.first_retry = options.longest_retry = std::chrono::seconds(10);
  return options;
}();

struct StripedOrder : testing::Test {
  std::optional<Cluster> c;
  std::vector<std::byte> from = std::vector<std::byte>(2 * KiB, std::byte{5}), to = std::vector<std::byte>(2 * KiB);
  RegionId source;
  RemoteRegion target;
  std::vector<std::string> heard;  // by b

  // Both rails are up, and a knows b's keys.
  void set_up(bool second_is_up = true) {
    c.emplace(7, 2, Duration{}, kSlowToRetry);
    c->second_of_b->is_read = second_is_up;
    ASSERT_TRUE(c->until([&] { return c->a.up && c->b.up; }));
    settle();
    source = *c->a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    target = c->b.engine->remote(*c->b.engine->register_region(to, MemoryKind::host, kAnyAccess));
    const Write first{.context = 99, .local = {source, 0}, .remote = {target, 0}, .length = 1};
    ASSERT_TRUE(c->a.engine->write(c->a.endpoint, {&first, 1}));
    ASSERT_TRUE(c->until([&] { return c->a.completed.erase(99) > 0; }));
    c->b.on_event = [this](const Event& event) {
      if (event.kind == EventKind::written) heard.push_back("write " + std::to_string(event.value));
      if (event.kind == EventKind::message) heard.emplace_back(as_text(event.message));
      if (event.kind == EventKind::closed) heard.emplace_back("closed");
    };
  }
  void settle() {
    for (int i = 0; i < 1000; ++i) c->turn();
  }
  // The first over rail 0, the second over rail 1, which has less under way then.
  void write_two() {
    std::vector<Write> writes;
    for (std::uint64_t i = 0; i < 2; ++i)
      writes.push_back(
          {.context = i, .local = {source, i * KiB}, .remote = {target, i * KiB}, .length = 1 * KiB, .notify = i});
    ASSERT_TRUE(c->a.engine->write(c->a.endpoint, writes));
  }
  // What rail 1 has brought lies unread when the message comes, which waits for it.
  void say_goodbye_ahead() {
    set_up();
    c->second_of_b->is_read = false;
    write_two();
    ASSERT_TRUE(c->until([&] { return c->a.completed.size() == 2; }));
    say("goodbye");
    settle();
    EXPECT_THAT(heard, ElementsAre("write 0"));
  }
  void say(std::string_view text) { ASSERT_TRUE(c->a.engine->send(c->a.endpoint, as_bytes(text))); }
};

TEST_F(StripedOrder, AMessageIsHeardBehindTheWritesThatWereCompleteWhenItWasSent) {
  set_up();
  c->second_of_b->is_read = false;
  write_two();
  say("before they are complete");
  ASSERT_TRUE(c->until([&] { return c->a.completed.size() == 2; }));
  say("goodbye");
  say("and again");
  settle();
  EXPECT_THAT(heard, testing::UnorderedElementsAre("write 0", "before they are complete"));
  heard.clear();
  c->second_of_b->is_read = true;
  settle();
  EXPECT_THAT(heard, ElementsAre("write 1", "goodbye", "and again"));
}

TEST_F(StripedOrder, AMessageIsHeardBehindAWriteWhoseRailEndedUnread) {
  ASSERT_NO_FATAL_FAILURE(say_goodbye_ahead());
  c->fabric.cut(*c->a.rails[1]);
  settle();
  EXPECT_THAT(heard, ElementsAre("write 0", "write 1", "goodbye"));
}

TEST_F(StripedOrder, WhatWaitsForAWriteIsHeardBeforeTheEndOfTheConnection) {
  ASSERT_NO_FATAL_FAILURE(say_goodbye_ahead());
  for (auto* rail : c->a.rails) c->fabric.kill(*rail);
  settle();
  c->b.engine->set_silence(std::chrono::milliseconds(2));
  c->second_of_b->is_read = true;
  settle();
  EXPECT_THAT(heard, ElementsAre("write 0", "write 1", "goodbye", "closed"));
}

// Its connecting end may have written over it, and repeats that over another rail once it has heard that this one is
// fenced: nothing may land over it any more.
TEST_F(StripedOrder, ALinkWhoseEndIsHeardBeforeItsBeginningIsNotTaken) {
  set_up(false);
  ASSERT_EQ(c->a.engine->rails()[1].up, 1u);
  ASSERT_EQ(c->b.engine->rails()[1].up, 0u);
  c->fabric.cut(*c->a.rails[1]);
  c->a.poll();
  say("it is down");
  ASSERT_TRUE(c->until([&] { return !heard.empty(); }));
  c->second_of_b->is_read = true;
  c->b.poll();
  EXPECT_EQ(c->b.engine->rails()[1].up, 0u);
}

// One end has it open and writes over it, and says that it is down; the other has not, and hears that when the next
// link of that rail has come and gone.
TEST(Striped, WhatWasUnderWayOnALinkThatOnlyOneEndHasSeenGoesOverAnother) {
  for (const bool by_caller : {true, false}) {
    SCOPED_TRACE(by_caller);
    Options options = kSlowToRetry;
    options.first_retry = options.longest_retry = std::chrono::milliseconds(3);
    Cluster c(7, 2, Duration{}, options);
    Side &sees = by_caller ? c.a : c.b, &other = by_caller ? c.b : c.a;
    Unread &first = by_caller ? *c.first_of_b : *c.first_of_a, &second = by_caller ? *c.second_of_b : *c.second_of_a;
    second.unseen = 1;
    ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up && sees.engine->rails()[1].up == 1; }));
    std::vector<std::byte> from(16 * KiB, std::byte{5}), to(16 * KiB);
    const RegionId source = *sees.engine->register_region(from, MemoryKind::host, kAnyAccess);
    const RegionId target = *other.engine->register_region(to, MemoryKind::host, kAnyAccess);
    const auto write = [&](std::uint64_t context) {
      const Write one{.context = context,
                      .local = {source, 0},
                      .remote = {other.engine->remote(target), 0},
                      .length = from.size(),
                      .notify = context};
      ASSERT_TRUE(sees.engine->write(sees.endpoint, {&one, 1}));
    };
    const auto turns = [&](int count) {
      while (count-- > 0) c.turn();
    };
    const Write asks{.local = {source, 0}, .remote = {other.engine->remote(target), 0}, .length = 1};
    ASSERT_TRUE(sees.engine->write(sees.endpoint, {&asks, 1}));
    ASSERT_TRUE(c.until([&] { return sees.completed.contains(0); }));
    first.is_read = false;
    write(1);
    for (int i = 0; i < 2; ++i) {
      c.fabric.cut(*other.rails[1]);
      turns(200);
    }
    first.is_read = true;
    turns(2000);
    ASSERT_TRUE(sees.completed.contains(1)) << "it waits for ever";
    EXPECT_FALSE(sees.completed[1]);
    EXPECT_EQ(other.written, std::vector<std::uint64_t>{1});
    EXPECT_EQ(to, from);
    EXPECT_FALSE(c.a.closed || c.b.closed);
  }
}

TEST_F(StripedOrder, AWriteThatIsWithdrawnAfterItHasLandedCostsNothing) {
  set_up();
  write_two();
  while (std::ranges::find(heard, "write 1") == heard.end()) {  // and stops before a hears that it is complete
    ASSERT_TRUE(c->fabric.step());
    c->b.poll();
  }
  c->a.engine->deregister(source);
  c->fabric.cut(*c->a.rails[1]);
  say("goodbye");
  settle();
  ASSERT_EQ(c->a.completed.size(), 2u);
  EXPECT_TRUE(c->a.completed[1]) << "it was lost with the rail";
  EXPECT_FALSE(c->a.closed || c->b.closed);
  EXPECT_EQ(heard.back(), "goodbye");
}

}  // namespace
}  // namespace rejoin::transport::striped
