// What was sent before close() is heard, as far as the peer has room for it.
#include <gtest/gtest.h>

#include "transport/factory.h"
#include "transport/tests/calling_pair.h"
#include "transport/tests/within.h"

namespace rejoin::transport {
namespace {

constexpr std::size_t kLong = 60'000;  // bytes of a message

struct Leaving {
  CallingPair pair;
  int heard = 0;  // by b
  bool farewell = false, ended = false;

  explicit Leaving(const std::string& transport) {
    pair.a = make_engine(transport).value();
    pair.b = make_engine(transport).value();
    pair.of_a = pair.a->connect(pair.b->listen({"127.0.0.1:0"}).value(), {}).value();
    EXPECT_TRUE(pair.until([&] { return pair.up_a && pair.up_b; }));
  }
  void send(int messages) {
    const Bytes message(kLong);
    for (int i = 0; i < messages; ++i) ASSERT_TRUE(pair.a->send(pair.of_a, message));
  }
  void leave() {
    ASSERT_TRUE(pair.a->send(pair.of_a, as_bytes("farewell")));
    pair.a->close(pair.of_a);
  }
  bool poll_b() {  // whether that brought anything
    const auto events = pair.b->poll();
    for (const auto& event : events) {
      heard += event.kind == EventKind::message;
      farewell |= event.kind == EventKind::message && as_text(event.message) == "farewell";
      ended |= event.kind == EventKind::closed;
    }
    return !events.empty();
  }
  void expect_all(int messages) {
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] { return (void)poll_b(), ended; }));
    EXPECT_EQ(heard, messages + 1);
    EXPECT_TRUE(farewell);
  }
};

TEST(Farewell, IsHeardThoughBytesOfThePeersLieUnread) {
  for (const std::string transport : {"tcp", "tcp+aes"}) {
    SCOPED_TRACE(transport);
    Leaving leaving(transport);
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(leaving.pair.b->send(leaving.pair.of_b, Bytes(kLong)));
    (void)leaving.pair.b->poll();
    leaving.send(12);
    leaving.leave();
    leaving.expect_all(12);
  }
}

TEST(Farewell, IsHeardWhereThereWasNoRoomBeforeAndThereIsNow) {
  Leaving leaving("shm");
  leaving.send(12);
  while (leaving.poll_b()) {
  }
  EXPECT_LT(leaving.heard, 12) << "all of it had room";
  leaving.leave();
  leaving.expect_all(12);
}

}  // namespace
}  // namespace rejoin::transport
