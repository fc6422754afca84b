// A piece that has landed and been notified, and whose completion is late: as of a NIC with several queue pairs, of
// which one waits for an acknowledgement while the others go on.
#include <gtest/gtest.h>

#include <algorithm>

#include "transport/tests/striped_cluster.h"

namespace rejoin::transport::striped {
namespace {

struct StripedLate : testing::Test {
  std::optional<Cluster> c;
  std::vector<std::byte> from = std::vector<std::byte>(64, std::byte{5}), to = std::vector<std::byte>(64);
  RegionId source;
  RemoteRegion target;

  // The second of two writes is notified, and late over rail 1; b uses its memory for something else.
  void set_up(Duration stall) {
    Options options = kOptions;
    options.stall = options.first_retry = options.longest_retry = stall;
    c.emplace(7, 2, Duration{}, options);
    ASSERT_TRUE(c->until([&] { return c->a.up && c->b.up; }));
    for (int i = 0; i < 1000; ++i) c->turn();
    source = *c->a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    target = c->b.engine->remote(*c->b.engine->register_region(to, MemoryKind::host, kAnyAccess));
    c->second_of_a->late_length = 2;
    write(0, 2, {1, 2});
    ASSERT_TRUE(c->until([&] { return c->second_of_a->late && c->b.written.size() == 2; }));
    EXPECT_FALSE(c->a.completed.contains(1));
    std::ranges::fill(to, std::byte{9});
  }
  void write(std::uint64_t first, std::uint64_t count, const std::vector<std::uint64_t>& lengths) {
    std::vector<Write> writes;
    for (std::uint64_t i = 0; i < count; ++i)
      writes.push_back({.context = first + i,
                        .local = {source, 0},
                        .remote = {target, lengths.size() == 1 ? 60 : i * 8},
                        .length = lengths[i % lengths.size()],
                        .notify = first + i});
    ASSERT_TRUE(c->a.engine->write(c->a.endpoint, writes));
  }
  void write_many(std::uint64_t first, std::uint64_t count) {
    ASSERT_NO_FATAL_FAILURE(write(first, count, {1}));
    ASSERT_TRUE(c->until([&] { return c->a.completed.size() >= first + count - 1; }));  // all but the late one
  }
  void expect_it_is_not_written_again() {
    ASSERT_TRUE(c->until([&] { return c->a.completed.contains(1); }));
    for (int i = 0; i < 1000; ++i) c->turn();
    EXPECT_FALSE(c->a.completed[1]);
    EXPECT_EQ(std::count(to.begin(), to.begin() + 60, std::byte{9}), 60);
    EXPECT_EQ(c->b.written.size(), c->a.completed.size());
  }
};

TEST_F(StripedLate, ItIsNotWrittenAgainHoweverManyFollowed) {
  ASSERT_NO_FATAL_FAILURE(set_up(std::chrono::seconds(10)));
  write_many(2, 8500);
  c->fabric.cut(*c->a.rails[1]);
  expect_it_is_not_written_again();
}

TEST_F(StripedLate, ItsRailGoesOnWhenItIsComplete) {
  ASSERT_NO_FATAL_FAILURE(set_up(std::chrono::seconds(10)));
  write_many(2, 3000);
  const auto before = c->second_of_a->writes;
  EXPECT_LT(before, 1100u) << "it ran ahead";
  c->second_of_a->let_late_complete();
  c->second_of_a->late_length = 0;
  ASSERT_TRUE(c->until([&] { return c->a.completed.contains(1); }));
  write_many(3002, 1000);
  EXPECT_GT(c->second_of_a->writes, before + 300);
}

TEST_F(StripedLate, ItsRailIsTakenOutAfterAStall) {
  ASSERT_NO_FATAL_FAILURE(set_up(kOptions.stall));
  for (std::uint64_t first = 2; !c->a.completed.contains(1); first += 1000) {
    ASSERT_LT(first, 20'000u);
    ASSERT_NO_FATAL_FAILURE(write_many(first, 1000));
  }
  expect_it_is_not_written_again();
}

}  // namespace
}  // namespace rejoin::transport::striped
