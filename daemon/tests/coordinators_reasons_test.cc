// What a node says of its coordinators where no step comes to be committed. slow_names_test.cc knows the names.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "daemon/tests/coordinator_stubs.h"

namespace rejoin::daemon {
namespace {

// They have lost their store, say: the way to it is not what is wrong.
TEST(Coordinators, OneThatLedAndIsReachedIsNotSaidToBeMissing) {
  NodeStub node;
  Fake a(node.io, node.keys);
  auto b = std::make_unique<Fake>(node.io, node.keys);
  const std::string led = b->listener.address();
  for (auto* one : {&a, b.get()}) one->say(4, false, led);
  const auto reason = [&] { return node.all->status(false).at("reason").get<std::string>(); };
  node.connect(a.listener.address() + ",localhost" + led.substr(led.rfind(':')));
  ASSERT_TRUE(node.until([&] { return a.view() && b->view(); }));
  EXPECT_EQ(reason(), "none of them says that it leads");
  node.io.poll();
  b.reset();
  ASSERT_TRUE(node.until([&] { return reason().ends_with(": Connection refused"); }));
  EXPECT_EQ(reason(), "none of them says that it leads; " + a.listener.address() + " says that " + led +
                          " does, in term 4: add that one to --connect where it is missing; otherwise look at it, at "
                          "the way to it, and at etcd; not reached: localhost" +
                          led.substr(led.rfind(':')) + ": Connection refused");
}

TEST(Coordinators, WhereNoneIsReachedItIsSaidWhyEachIsNot) {
  NodeStub node;
  node.connect("127.0.0.1:1,unknown.example:7000,127.0.0.2:1");
  std::string reason;
  ASSERT_TRUE(node.until([&] {
    reason = node.all->status(false).at("reason").get<std::string>();
    return std::ranges::count(reason, ';') == 2;
  })) << reason;
  EXPECT_TRUE(
      reason.starts_with("none of them is reached: 127.0.0.1:1: Connection refused; unknown.example:7000: its "))
      << reason;
  EXPECT_TRUE(reason.ends_with("; 127.0.0.2:1: Connection refused")) << reason;
}

TEST(Coordinators, OfALeaderThatCantWriteItIsSaid) {
  for (const bool alone : {false, true}) {
    NodeStub node;
    Fake a(node.io, node.keys), b(node.io, node.keys);
    a.say(4, true, {}, true);
    node.connect(alone ? a.listener.address() : a.listener.address() + "," + b.listener.address());
    const auto reason = [&](const nlohmann::json& of) { return of.at("reason").get<std::string>(); };
    ASSERT_TRUE(node.until([&] { return node.story == "u" && !reason(node.all->status(true)).empty(); }));
    const auto status = node.all->status(true);
    EXPECT_TRUE(reason(status).starts_with("the coordinators' store does not take what it decides")) << status;
    if (!alone) {
      EXPECT_EQ(reason(status.at("all").at(0)), reason(status));
    }
    a.say(4, true);
    EXPECT_TRUE(node.until([&] { return reason(node.all->status(true)).empty(); }));
  }
}

}  // namespace
}  // namespace rejoin::daemon
