// Both ends of a node's connections to its coordinators, over real sockets.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "daemon/coordinators.h"
#include "daemon/node_listener.h"

namespace rejoin::daemon {

using namespace std::chrono_literals;
using membership::NodeId;

inline constexpr auto kSilence = 500ms;

// A coordinator that says what it is told to.
struct Fake {
  Fake(asio::io_context& io, const JobKeys& keys, const std::string& where = "127.0.0.1:0")
      : listener(io, keys, kSilence,
                 {.message =
                      [this](NodeId node, const proto::FromNode& message) {
                        last = node;
                        said.push_back(message);
                        if ((message.has_hello() || message.has_rank_up()) && leads) tell(node);
                        if (message.has_heartbeat() && alone) answer(node);
                      },
                  .lost = [this](NodeId) { ++lost; }}) {
    const auto listening = listener.listen(where);
    EXPECT_TRUE(listening) << listening.error().message;
  }
  // … whether it leads, in this term.
  void say(std::uint64_t term, bool leading, const std::string& who = {}, bool stalled = false) {
    leads.emplace();
    leads->mutable_leads()->set_term(term);
    leads->mutable_leads()->set_leads(leading);
    leads->mutable_leads()->set_stalled(stalled);
    leads->mutable_leads()->set_address(who.empty() ? listener.address() : who);
    if (last.value != 0) tell(last);
  }
  void tell(NodeId node) { listener.send(node, leads->SerializeAsString()); }
  void answer(NodeId node) {
    proto::ToNode message;
    message.mutable_heartbeat();
    listener.send(node, message.SerializeAsString());
  }
  void plan(std::uint64_t epoch) {
    proto::ToNode message;
    message.mutable_plan()->set_epoch(epoch);
    listener.send(last, message.SerializeAsString());
  }
  std::size_t heard(proto::FromNode::KindCase kind) const {
    return static_cast<std::size_t>(
        std::count_if(said.begin(), said.end(), [&](const auto& one) { return one.kind_case() == kind; }));
  }
  std::optional<proto::LeaderView> view() const {
    for (auto one = said.rbegin(); one != said.rend(); ++one)
      if (one->has_leader_view()) return one->leader_view();
    return std::nullopt;
  }
  std::optional<proto::ToNode> leads;
  bool alone = false;  // as one is whose decisions are in a file
  NodeId last;
  std::vector<proto::FromNode> said;
  int lost = 0;
  NodeListener listener;
};

// A node without ranks, and what it was told: u up, d down, and the epochs of plans.
struct NodeStub {
  asio::io_context io{1};
  JobKeys keys{JobKey("0123456789abcdef")};
  std::string story;
  bool chokes = false;
  std::unique_ptr<Coordinators> all;

  void connect(const std::string& addresses) {
    all = std::make_unique<Coordinators>(
        io, addresses, "n", keys, kSilence, [](proto::LeaderView& view) { view.add_hosts()->set_replica(7); },
        Upstream::Handlers{.up =
                               [this] {
                                 story += 'u';
                                 proto::FromNode rank;
                                 if (std::exchange(chokes, false))  // no connection takes that
                                   rank.mutable_rank_up()->set_node(std::string(Framed::kMaxFrame, 'x'));
                                 rank.mutable_rank_up()->set_replica(7);
                                 all->send(rank);
                               },
                           .message =
                               [this](const proto::ToNode& message) {
                                 if (message.has_plan()) story += fmt::format("{}", message.plan().epoch());
                               },
                           .down = [this] { story += 'd'; },
                           .over = [] { return false; },
                           .rejected = [] {}});
    all->connect();
  }
  bool until(const std::function<bool()>& condition, std::chrono::seconds most = 20s) {
    const TimePoint deadline = SteadyClock().now() + most;
    for (TimePoint tick{}; !condition();) {
      const TimePoint now = SteadyClock().now();
      if (now > deadline) return false;
      if (all && now - tick > kSilence / 16) {
        all->tick(now);
        tick = now;
      }
      io.run_one_for(1ms);
      io.poll();
      io.restart();
    }
    return true;
  }
  void go_on_for(std::chrono::milliseconds time) {
    const TimePoint begun = SteadyClock().now();
    until([&] { return SteadyClock().now() - begun > time; });
  }
};

}  // namespace rejoin::daemon
