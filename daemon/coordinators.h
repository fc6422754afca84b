// The connections of a daemon or a relay to all coordinators of its job, as one: what is sent goes to the one that
// leads (membership/leader_tracker.h), and only what that one says is heard. With one address it is that one's
// Upstream. All in the io_context's thread.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/upstream.h"
#include "membership/leader_tracker.h"

namespace rejoin::daemon {

class Coordinators {
 public:
  // `addresses`: "host:port,host:port…". `name`: the node's. `hosts` writes down the ranks behind it. `up` and `down`
  // of the handlers take turns: there is one that leads, and its machine knows nothing of this node yet; it is lost.
  Coordinators(asio::io_context& io, const std::string& addresses, const std::string& name, const JobKeys& keys,
               std::chrono::milliseconds silence, std::function<void(proto::LeaderView&)> hosts,
               Upstream::Handlers handlers);
  void connect();
  void send(const proto::FromNode& message);
  // Nothing more is sent. `over` is called once, when the one that leads has read all that was sent to it, or can't.
  void finish(std::function<void()> over);
  // Connects anew with the one that leads if that was last heard too long ago.
  void check(TimePoint heard);
  const Upstream::Ends& ends() const { return all_[leader_.value_or(0)]->ends(); }  // of the one that leads, or led
  void tick(TimePoint now);                                                         // at least every silence / 8
  // Of one: its address, whether it is connected, as whoever asks knows, and why not, or what is wrong with it. Of
  // several: the same of the one that leads, `leader` with its term, and `all`.
  nlohmann::json status(bool connected) const;

 private:
  using Actions = membership::LeaderTracker::Actions;
  struct Step {
    Actions actions;
    std::optional<std::size_t> leader;  // that `up` is of
  };
  void carry_out(Actions actions, const proto::ToNode* message = nullptr);
  void carry_out(const Step& step, const proto::ToNode* message);
  void look_elsewhere();
  std::string leads_elsewhere() const;
  std::string why_none_leads() const;

  const Upstream::Handlers handlers_;
  membership::LeaderTracker tracker_;
  std::vector<std::unique_ptr<Upstream>> all_;
  std::optional<std::size_t> leader_;  // as the handlers have been told
  // While one step is carried out a connection may end: what follows from that comes behind it.
  bool busy_ = false;
  std::deque<Step> steps_;
};

}  // namespace rejoin::daemon
