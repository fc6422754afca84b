// What is longer than a turn over shared memory: nobody else waits until it is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/fd.h"
#include "transport/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/calling_pair.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

struct ShmTurns : testing::TestWithParam<bool> {  // whether the memory is a file's
  static constexpr std::uint64_t kLength = 4 * MiB + 5;
  CallingPair pair;
  Mapping from = memory(), to = memory();
  RegionId source, target;  // a's and b's
  std::vector<Event> of_a, of_b;

  static Mapping memory() { return (GetParam() ? Mapping::shareable(kLength) : Mapping::anonymous(kLength)).value(); }
  void SetUp() override {
    for (std::size_t i = 0; i < kLength; i += 61) from.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
    pair.a = make_engine("shm").value();
    pair.b = make_engine("shm").value();
    source = pair.a->register_region(from.span(), MemoryKind::host, kAnyAccess).value();
    target = pair.b->register_region(to.span(), MemoryKind::host, kAnyAccess).value();
    pair.of_a = pair.a->connect(pair.b->listen({}).value(), {}).value();
    ASSERT_TRUE(pair.until([&] { return pair.up_a && pair.up_b; }));
  }
  void write() {
    const Write one{
        .context = 1, .local = {source, 0}, .remote = {pair.b->remote(target), 0}, .length = kLength, .notify = 5};
    ASSERT_TRUE(pair.a->write(pair.of_a, {&one, 1}));
  }
  void read() {  // a's memory by b
    const Read one{.context = 2, .local = {target, 0}, .remote = {pair.a->remote(source), 0}, .length = kLength};
    ASSERT_TRUE(pair.b->read(pair.of_b, {&one, 1}));
    poll(*pair.a, of_a);
  }
  static void poll(Engine& engine, std::vector<Event>& events) {
    for (const auto& event : engine.poll()) events.push_back(event);
  }
  void settle() {
    for (int i = 0; i < 1000; ++i) poll(*pair.b, of_b), poll(*pair.a, of_a);
  }
  // b's, until the first event.
  int turns() {
    int turns = 0;
    for (; of_b.empty() && turns < 1000; ++turns) {
      EXPECT_FALSE(pair.b->arm()) << "it would sleep over what is left";
      poll(*pair.b, of_b);
    }
    return turns;
  }
  // Of all events those of this kind.
  static std::vector<Event> those(EventKind kind, const std::vector<Event>& events) {
    std::vector<Event> some;
    std::ranges::copy_if(events, std::back_inserter(some), [&](const Event& event) { return event.kind == kind; });
    return some;
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, ShmTurns, testing::Bool(),
                         [](const auto& i) { return i.param ? "of_a_file" : "private"; });

TEST_P(ShmTurns, AWriteComesWholeAndIsToldOnce) {
  write();
  ASSERT_TRUE(pair.a->send(pair.of_a, as_bytes("behind it")));
  EXPECT_EQ(turns(), 2);
  EXPECT_TRUE(same_bytes(from.span(), to.span()));
  settle();
  ASSERT_EQ(of_b.size(), 2u);
  EXPECT_EQ(of_b[0].kind, EventKind::written);
  EXPECT_EQ(of_b[0].value, 5u);
  EXPECT_EQ(of_b[1].kind, EventKind::message);
  ASSERT_EQ(of_a.size(), 1u);
  EXPECT_FALSE(of_a[0].error);
}

TEST_P(ShmTurns, AReadComesWholeAndEndsOnce) {
  read();
  EXPECT_EQ(turns(), 2);
  settle();
  EXPECT_TRUE(same_bytes(from.span(), to.span()));
  ASSERT_EQ(of_b.size(), 1u);
  EXPECT_FALSE(of_b[0].error);
}

TEST_P(ShmTurns, NothingLandsInMemoryThatIsTakenBackMeanwhile) {
  write();
  poll(*pair.b, of_b);
  pair.b->deregister(target);
  std::ranges::fill(to.span(), std::byte{0xee});
  settle();
  EXPECT_TRUE(all_are(std::byte{0xee}, to.span()));
  EXPECT_TRUE(of_b.empty());
  ASSERT_EQ(of_a.size(), 1u);
  ASSERT_TRUE(of_a[0].error);
  EXPECT_EQ(of_a[0].error->code, ErrorCode::refused);
}

TEST_P(ShmTurns, NothingIsToldOfWhatItsWriterTakesBackMeanwhile) {
  write();
  poll(*pair.b, of_b);
  pair.a->deregister(source);
  settle();
  EXPECT_EQ(those(EventKind::completed, of_a).size(), 1u);
  EXPECT_TRUE(those(EventKind::completed, of_a).at(0).error);
  EXPECT_TRUE(those(EventKind::written, of_b).empty());
}

TEST_P(ShmTurns, AReadOfMemoryThatIsTakenBackMeanwhileIsRefused) {
  read();
  poll(*pair.b, of_b);
  pair.a->deregister(source);
  settle();
  ASSERT_EQ(of_b.size(), 1u);
  ASSERT_TRUE(of_b[0].error);
  EXPECT_EQ(of_b[0].error->code, ErrorCode::refused);
}

// What is taken back is another region that the peer has read. What is in its place by then is not moved again.
TEST_P(ShmTurns, AReadGoesOnWhereItWasWhereSomethingElseIsTakenBack) {
  const Mapping others = memory();
  const RegionId other = pair.a->register_region(others.span(), MemoryKind::host, kAnyAccess).value();
  const Read first{.context = 1, .local = {target, 0}, .remote = {pair.a->remote(other), 0}, .length = 64 * KiB};
  ASSERT_TRUE(pair.b->read(pair.of_b, {&first, 1}));
  settle();
  ASSERT_EQ(of_b.size(), 1u);
  of_b.clear();
  read();
  poll(*pair.b, of_b);
  const auto moved = to.data()[61];
  from.data()[61] = ~moved;
  pair.a->deregister(other);
  settle();
  ASSERT_EQ(of_b.size(), 1u);
  EXPECT_FALSE(of_b[0].error);
  EXPECT_EQ(to.data()[61], moved);
  from.data()[61] = moved;
  EXPECT_TRUE(same_bytes(from.span(), to.span()));
}

}  // namespace
}  // namespace rejoin::transport
