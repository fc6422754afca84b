// A node's connections to several coordinators, over real sockets.
#include "daemon/coordinators.h"

#include <nlohmann/json.hpp>

#include "base/deadlines.h"
#include "daemon/tests/coordinator_stubs.h"

namespace rejoin::daemon {
namespace {

TEST(Coordinators, AllTicksOfASilenceTakeItAndNoneIsLongerThanHalfASecond) {
  for (const auto silence : {200ms, 1'000ms, 7'999ms, 8'000ms, 8'001ms, 60'000ms, 3'600'000ms}) {
    const auto tick = deadlines::tick_of(silence);
    EXPECT_GE(tick * deadlines::ticks_of(silence), silence);
    EXPECT_LE(tick, std::min(silence / 8, 501ms + 1ms)) << silence.count();
  }
}

TEST(Coordinators, OneAddressIsTakenForTheLeaderUnasked) {
  NodeStub node;
  Fake only(node.io, node.keys);
  node.connect(only.listener.address());
  ASSERT_TRUE(node.until([&] { return only.heard(proto::FromNode::kRankUp) == 1; }));
  EXPECT_EQ(node.story, "u");
  EXPECT_EQ(only.heard(proto::FromNode::kHello), 0u) << "its machine introduces itself";
  only.plan(3);
  ASSERT_TRUE(node.until([&] { return node.story == "u3"; }));
  node.go_on_for(kSilence / 4);
  EXPECT_FALSE(only.view()) << "it has not asked for any";
  EXPECT_EQ(node.all->status(true).dump(), nlohmann::json({{"address", only.listener.address()},
                                                           {"connected", true},
                                                           {"reason", ""},
                                                           {"protocol", 15},  // it has been told of none
                                                           {"release", ""}})
                                               .dump());
  only.listener.close_all();
  ASSERT_TRUE(node.until([&] { return only.heard(proto::FromNode::kRankUp) == 2; }));
  EXPECT_EQ(node.story, "u3du");
}

TEST(Coordinators, TheHighestTermIsFollowedAndWhatOthersSayIsNotHeard) {
  NodeStub node;
  Fake a(node.io, node.keys), b(node.io, node.keys);
  a.say(4, true);
  b.say(0, false);
  node.connect(a.listener.address() + "," + b.listener.address());
  ASSERT_TRUE(node.until([&] { return a.heard(proto::FromNode::kRankUp) == 1 && b.view(); }));
  EXPECT_EQ(b.heard(proto::FromNode::kRankUp), 0u);
  EXPECT_EQ(node.story, "u");
  b.plan(9);
  a.plan(1);
  ASSERT_TRUE(node.until([&] { return node.story == "u1"; }));
  b.say(5, true);  // a does not know yet
  ASSERT_TRUE(node.until([&] { return b.heard(proto::FromNode::kRankUp) == 1; }));
  EXPECT_EQ(node.story, "u1du");
  a.plan(8);
  a.say(4, true);
  b.plan(2);
  ASSERT_TRUE(node.until([&] { return node.story == "u1du2"; }));
  node.go_on_for(kSilence / 4);
  EXPECT_EQ(node.story, "u1du2");
  ASSERT_TRUE(a.view());
  EXPECT_EQ(a.view()->term(), 5u);
  const auto status = node.all->status(true);
  EXPECT_EQ(status.at("address"), b.listener.address());
  EXPECT_EQ(status.at("leader").at("term"), 5);
  EXPECT_EQ(status.at("all").size(), 2u);
}

TEST(Coordinators, ALostLeaderIsToldToTheOthersAtOnceAndOneThatCantWriteIsLostToo) {
  NodeStub node;
  auto a = std::make_unique<Fake>(node.io, node.keys);
  Fake b(node.io, node.keys);
  const std::string address = a->listener.address();
  a->say(4, true);
  b.say(4, false);
  node.connect(address + "," + b.listener.address());
  ASSERT_TRUE(node.until([&] { return b.view() && !b.view()->lost() && b.view()->term() == 4; }));
  EXPECT_EQ(b.view()->hosts(0).replica(), 7u);
  a->say(4, true, {}, true);
  ASSERT_TRUE(node.until([&] { return b.view()->lost(); }));
  EXPECT_EQ(node.story, "u") << "its messages hold all the same";
  a->say(4, true);
  ASSERT_TRUE(node.until([&] { return !b.view()->lost(); }));
  node.io.poll();
  a.reset();
  ASSERT_TRUE(node.until([&] { return b.view()->lost(); }));
  EXPECT_EQ(node.story, "ud");
  const auto status = node.all->status(false);
  EXPECT_TRUE(status.at("reason").get<std::string>().starts_with(
      "none of them says that it leads; not reached: " + address + ": "))
      << status;
  EXPECT_EQ(status.at("address"), address + "," + b.listener.address());
  b.say(5, true);
  ASSERT_TRUE(node.until([&] { return node.story == "udu"; }));
  a = std::make_unique<Fake>(node.io, node.keys, address);
  a->say(4, true);
  ASSERT_TRUE(node.until([&] { return a->view() && a->view()->term() == 5; }));
  EXPECT_EQ(node.story, "udu") << "one that has come back leads nobody";
}

// As a headless Service of Kubernetes is one. Each of them is a standby first; slow_names_test.cc knows the name.
TEST(Coordinators, OfANameThatStandsForSeveralTheOneThatLeadsIsFoundAndStayedWith) {
  NodeStub node;
  Fake first(node.io, node.keys, "127.0.0.11:0");
  const std::string port = first.listener.address().substr(first.listener.address().rfind(':'));
  Fake second(node.io, node.keys, "127.0.0.12" + port), third(node.io, node.keys, "127.0.0.13" + port);
  const std::string lost = "127.0.0.14" + port;
  for (auto* one : {&first, &second, &third}) one->say(3, false, lost);
  node.connect("three.example" + port);
  const auto introduced = [](const Fake& to) { return to.heard(proto::FromNode::kRankUp) > 0; };
  ASSERT_TRUE(node.until([&] { return introduced(first) && introduced(second) && introduced(third); }));
  ASSERT_TRUE(node.until([&] { return node.story.ends_with('d'); }));
  const auto why = node.all->status(false).at("reason").get<std::string>();
  EXPECT_TRUE(why.starts_with("it does not lead; three.example" + port + " says that " + lost)) << why;
  second.say(4, true);
  ASSERT_TRUE(node.until([&] {
    second.plan(7);
    return node.story.ends_with('7');
  }));
  const auto before = node.story.size();
  for (const TimePoint until = SteadyClock().now() + kSilence; SteadyClock().now() < until; second.plan(7))
    node.go_on_for(kSilence / 16);
  EXPECT_EQ(node.story.find('d', before), std::string::npos) << node.story;
}

// slow_names_test.cc knows the name.
TEST(Coordinators, ANameThatWasAnotherOnesAddressIsLookedUpAgainWhereNoneLeads) {
  NodeStub node;
  Fake first(node.io, node.keys, "127.0.0.15:0");
  const std::string port = first.listener.address().substr(first.listener.address().rfind(':'));
  Fake leader(node.io, node.keys, "127.0.0.16" + port);
  first.say(3, false, leader.listener.address());
  leader.say(3, true);
  node.connect(first.listener.address() + ",moved.example" + port);
  ASSERT_TRUE(node.until([&] { return node.story == "u"; })) << node.all->status(false);
  EXPECT_EQ(leader.heard(proto::FromNode::kRankUp), 1u);
  EXPECT_EQ(first.lost, 1) << "the other connection stays";
}

// The other address takes the call, and shows the key when it is too late.
TEST(Coordinators, OneThatBeginsToLeadIsStayedWithWhereAnotherAddressOfItsNameIsBeingTried) {
  NodeStub node;
  asio::ip::tcp::acceptor other(node.io, {asio::ip::address_v4::loopback(), 0});
  const auto port = fmt::format(":{}", other.local_endpoint().port());
  Fake first(node.io, node.keys, "127.0.0.9" + port);
  first.say(3, false);
  node.connect("two.example" + port);
  ASSERT_TRUE(node.until([&] { return node.story == "ud"; }));
  std::shared_ptr<Framed> late;
  other.async_accept([&](asio::error_code error, asio::ip::tcp::socket socket) {
    if (!error) late = std::make_shared<Framed>(std::move(socket), node.keys, true);
  });
  ASSERT_TRUE(node.until([&] { return late != nullptr; }));
  first.say(4, true);
  ASSERT_TRUE(node.until([&] {
    first.plan(7);
    return node.story.ends_with('7');
  }));
  bool over = false, taken = false;
  late->start({.ready = [&] { taken = true; },
               .message = [](std::string_view) {},
               .closed = [&](const std::string&) { over = true; }},
              kSilence);
  ASSERT_TRUE(node.until([&] { return over || taken; }));
  EXPECT_FALSE(taken);
  EXPECT_EQ(node.story.substr(0, 4), "udu7");
  EXPECT_EQ(node.story.find('d', 4), std::string::npos) << node.story;
  late->close();
}

TEST(Coordinators, AStandbyOnWhoseConnectionNothingComesIsConnectedWithAnew) {
  NodeStub node;
  Fake a(node.io, node.keys), silent(node.io, node.keys);
  a.say(4, true);
  node.connect(a.listener.address() + "," + silent.listener.address());
  ASSERT_TRUE(node.until([&] { return node.story == "u" && silent.heard(proto::FromNode::kHello) == 1; }));
  ASSERT_TRUE(node.until([&] {
    a.say(4, true);
    return silent.heard(proto::FromNode::kHello) == 3;
  }));
  EXPECT_EQ(node.story, "u");
  EXPECT_GE(silent.lost, 1);
}

// One that leads besides is followed; and the connection is not made anew, as one would be over which nothing comes.
TEST(Coordinators, OneThatDecidesAloneIsNamedWithTheRemedy) {
  NodeStub node;
  Fake a(node.io, node.keys), alone(node.io, node.keys);
  a.say(4, true);
  alone.alone = true;
  testing::internal::CaptureStdout();
  node.connect(a.listener.address() + "," + alone.listener.address());
  const bool heard = node.until([&] {
    if (alone.last.value != 0) a.answer(a.last);
    return alone.heard(proto::FromNode::kHeartbeat) >= 6;
  });
  const auto status = node.all->status(true);
  node.all.reset();
  const std::string log = testing::internal::GetCapturedStdout();
  ASSERT_TRUE(heard);
  EXPECT_LT(alone.lost, 3) << "a pause of this machine may cost a connection";
  EXPECT_EQ(node.story, "u");
  const std::string why = "decides alone (--store file): --connect takes its address only";
  EXPECT_TRUE(status.at("all").at(1).at("reason").get<std::string>().starts_with(why)) << status.dump();
  EXPECT_EQ(status.at("all").at(0).at("reason"), "");
  const std::string line = "the coordinator at " + alone.listener.address() + " " + why;
  EXPECT_EQ(log.find(line), log.rfind(line));
  EXPECT_NE(log.find(line), std::string::npos) << log;
  EXPECT_EQ(log.find("nothing was heard"), std::string::npos) << log;
}

TEST(Coordinators, AConnectionThatEndsWhileTheLeaderIsGreetedIsLostAfterIt) {
  NodeStub node;
  Fake a(node.io, node.keys), b(node.io, node.keys);
  a.say(4, true);
  b.say(4, false);
  node.chokes = true;
  node.connect(a.listener.address() + "," + b.listener.address());
  ASSERT_TRUE(node.until([&] { return a.heard(proto::FromNode::kRankUp) == 1; }));
  EXPECT_EQ(node.story, "udu");
}

// One of a later release, which speaks nothing that this node does.
struct Later {
  Later(asio::io_context& io, const JobKeys& job) : keys(job), acceptor(io, {asio::ip::address_v4::loopback(), 0}) {
    accept();
  }
  void accept() {
    acceptor.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
      if (error) return;
      connection = std::make_shared<Framed>(std::move(socket), keys, true);
      connection->start({.ready = [] {},
                         .message =
                             [this](std::string_view) {
                               proto::ToNode answer;
                               answer.mutable_welcome()->set_refusal("node n speaks 15 to 16: upgrade node n first");
                               connection->send_last(answer.SerializeAsString(), kSilence);
                             },
                         .closed = [](const std::string&) {}},
                        kSilence);
      accept();
    });
  }
  const JobKeys& keys;
  asio::ip::tcp::acceptor acceptor;
  std::shared_ptr<Framed> connection;
};

TEST(Coordinators, ThatTheyRefuseThisNodeIsToldWithTheReason) {
  NodeStub node;
  Later one(node.io, node.keys), other(node.io, node.keys);
  const auto address = [](const Later& of) { return fmt::format("127.0.0.1:{}", of.acceptor.local_endpoint().port()); };
  node.connect(address(one) + "," + address(other));
  const std::string refusal = "it refuses this node: node n speaks 15 to 16: upgrade node n first";
  ASSERT_TRUE(node.until([&] {
    const auto all = node.all->status(false).at("all");
    return all.at(0).at("reason") == refusal && all.at(1).at("reason") == refusal;
  }));
  EXPECT_EQ(node.all->status(false).at("reason"), address(one) + ": " + refusal);
  EXPECT_EQ(node.story, "");
  asio::error_code ignored;
  for (Later* each : {&one, &other}) each->acceptor.close(ignored);
}

TEST(Coordinators, ANameIsResolvedAndOneThatDoesNotExistIsToldAndTriedAgain) {
  NodeStub node;
  Fake a(node.io, node.keys);
  const std::string port = a.listener.address().substr(a.listener.address().rfind(':'));
  a.say(1, true);
  node.connect("localhost" + port + ",no.such.host.invalid:7000");
  ASSERT_TRUE(node.until([&] { return node.story == "u"; }));
  ASSERT_TRUE(node.until([&] {
    return node.all->status(true).at("all").at(1).at("reason").get<std::string>().find("its name is not resolved") !=
           std::string::npos;
  }));
  EXPECT_EQ(node.story, "u");
}

}  // namespace
}  // namespace rejoin::daemon
