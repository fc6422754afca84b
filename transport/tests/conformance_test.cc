// What every backend must do. One suite; here: connections and messages, and the backends that the suite runs over.
#include "transport/tests/conformance.h"

#include <algorithm>
#include <random>

#include "transport/tests/backends.h"
#include "transport/unsent.h"

namespace rejoin::transport {
namespace {

TEST_P(Conformance, HelloReachesTheAcceptingSide) {
  auto p = pair();
  EXPECT_EQ(p.b.hello, "hello there");
  EXPECT_EQ(p.a.connected.at(0), p.at_a);
}

// By the kernel, of TCP, and by the simulated network; nothing is made up.
TEST_P(Conformance, ARoundTripIsToldWhereItIsMeasured) {
  auto p = pair();
  const std::string& name = GetParam();  // UCX's over its TCP has a colon before it
  const bool measured = name.ends_with("sim") || (name.find("tcp") != std::string::npos && !name.starts_with("ucx") &&
                                                  !name.starts_with("staged_ucx"));
  const std::initializer_list<std::pair<Node*, EndpointId>> ends = {{&p.a, p.at_a}, {&p.b, p.at_b}};
  for (const auto& [node, endpoint] : ends) {
    const auto round_trip = node->engine->round_trip(endpoint);
    ASSERT_EQ(round_trip.has_value(), measured);
    if (!measured) continue;
    EXPECT_GE(*round_trip, Duration{});
    EXPECT_LT(*round_trip, std::chrono::seconds(10));
  }
  for (const auto& [node, endpoint] : ends) {
    node->engine->close(endpoint);
    EXPECT_FALSE(node->engine->round_trip(endpoint));
  }
}

TEST_P(Conformance, ConnectingToNobodyEndsInClosed) {
  Node& a = node();
  std::string nowhere;
  {
    Node gone;
    gone.engine = bench->engine();
    nowhere = gone.engine->listen(bench->anywhere())->text;
  }
  auto endpoint = a.engine->connect({nowhere}, {});
  if (!endpoint) return;  // refused at once: also an answer
  EXPECT_TRUE(until([&] { return !a.closed.empty(); }));
}

TEST_P(Conformance, MessagesArriveInOrderWhateverTheirSize) {
  auto p = pair();
  std::vector<std::string> sent;
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const std::size_t sizes[] = {1, 8, 100, 3000, 9000, 40000, Engine::kMaxMessage};
    sent.push_back(std::string(sizes[random() % 7], static_cast<char>('a' + i % 26)));
    ASSERT_TRUE(p.a.engine->send(p.at_a, as_bytes(sent.back())));
  }
  ASSERT_TRUE(until([&] { return p.b.messages.size() == sent.size(); }));
  EXPECT_EQ(p.b.messages, sent);
}

TEST_P(Conformance, MessageOverTheLimitIsRefused) {
  auto p = pair();
  auto sent = p.a.engine->send(p.at_a, Bytes(Engine::kMaxMessage + 1));
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, ErrorCode::invalid_argument);
}

TEST_P(Conformance, OneEndpointsEndDisturbsNoOther) {
  Node& hub = node();
  constexpr int peers = 12;
  std::vector<Node*> spokes;
  std::vector<EndpointId> ends;
  for (int i = 0; i < peers; ++i) {
    spokes.push_back(&node());
    ends.push_back(*spokes.back()->engine->connect(hub.address, as_bytes(std::to_string(i))));
  }
  ASSERT_TRUE(until([&] {
    return hub.accepted.size() == peers &&
           std::all_of(spokes.begin(), spokes.end(), [](Node* n) { return n->connected.size() == 1; });
  }));
  for (int i = 0; i < peers; i += 2) spokes[i]->engine->close(ends[i]);
  ASSERT_TRUE(until([&] { return hub.closed.size() == peers / 2; }));
  for (int i = 1; i < peers; i += 2) ASSERT_TRUE(spokes[i]->engine->send(ends[i], as_bytes("alive")));
  EXPECT_TRUE(until([&] { return hub.messages.size() == peers / 2; }));
}

// The fabric of the simulated ones is this process's memory, and the test bounds what it runs.
TEST_P(Conformance, APeerThatTakesNothingIsGivenUpAtABoundAndNobodyElse) {
  if (GetParam().ends_with("sim")) GTEST_SKIP() << "what it has sent is with the peer";
  auto both = pair();
  Node& a = both.a;
  const EndpointId at_a = both.at_a;
  Node& other = node();
  const EndpointId to_other = *a.engine->connect(other.address, as_bytes("hello"));
  ASSERT_TRUE(until([&] { return a.connected.size() == 2; }));
  const std::string message(Engine::kMaxMessage, 'x');
  std::size_t taken = 0;
  for (; taken < 2 * Unsent::kMost && a.engine->send(at_a, as_bytes(message)); taken += message.size()) a.poll();
  EXPECT_GE(taken, Unsent::kMost / 2);
  EXPECT_LT(taken, 2 * Unsent::kMost);
  for (int i = 0; i < 2000 && a.closed.empty(); ++i) a.poll();
  EXPECT_EQ(a.closed, std::vector<EndpointId>{at_a});
  ASSERT_TRUE(a.engine->send(to_other, as_bytes("alive")));
  EXPECT_TRUE(until([&] { return other.messages.size() == 1; }));
}

std::vector<std::string> with_staging(std::vector<std::string> names) {
  const auto below = names;
  for (const auto& name : below) {
    const bool plain = name.find_first_of(",;") == std::string::npos && !name.starts_with("threaded_");
    if (name.starts_with("ucx") || plain) names.push_back("staged_" + name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Backends, Conformance,
                         testing::ValuesIn(with_kernel(with_staging(
                             with_rdma({"sim", "striped_sim", "shm", "tcp", "tcp+aes", "tcp:127.0.0.1,127.0.0.2",
                                        "tcp;threads=2", "threaded_tcp", "staged_tcp;threads=2", "ucx:tcp,self"})))),
                         [](const auto& backend) { return name_of(backend.param); });

}  // namespace
}  // namespace rejoin::transport
