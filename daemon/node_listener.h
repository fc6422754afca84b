// The coordinator and each relay listen here for the connections of daemons. Everything runs in the io_context's
// thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>

#include "base/log.h"
#include "base/seldom.h"
#include "control.pb.h"
#include "daemon/framed.h"
#include "membership/coordinator.h"

namespace rejoin::daemon {

class NodeListener {
 public:
  struct Handlers {
    std::function<void(membership::NodeId, const proto::FromNode&)> message;
    std::function<void(membership::NodeId)> lost;  // not after close(), nor within send()
    bool takes_relays = true;
  };
  // `silence`: the job's, of which the deadline for a caller's proof is made.
  NodeListener(asio::io_context& io, const JobKeys& keys, Duration silence, Handlers handlers)
      : acceptor_(io), again_(io), keys_(keys), silence_(silence), handlers_(std::move(handlers)) {}
  ~NodeListener();
  NodeListener(const NodeListener&) = delete;
  NodeListener& operator=(const NodeListener&) = delete;
  // Starts to listen. The error has the system's text alone; the caller adds what it was for.
  Result<> listen(const std::string& where);
  const std::string& address() const { return address_; }
  void send(membership::NodeId node, const std::string& message);  // serialized
  void close(membership::NodeId node);
  void close_all();
  std::size_t nodes() const { return nodes_.size(); }
  std::uint64_t rejected() const { return rejected_; }  // connections and messages
  std::size_t strangers() const { return strangers_.size(); }

 private:
  static constexpr auto kRefusalsApart = std::chrono::seconds(60);  // in the log
  void greet(asio::ip::tcp::socket socket);
  void make_room();
  void lose(membership::NodeId node);
  void never_a_node(const Framed& connection, const std::string& why);
  void log_refusal(spdlog::level::level_enum level, const std::string& remote, const std::string& line);
  void accept();
  std::chrono::milliseconds proof_deadline() const;
  void on_bytes(membership::NodeId node, std::string_view bytes);
  void record_heard(const proto::FromNode& message, std::string_view bytes);

  asio::ip::tcp::acceptor acceptor_;
  asio::steady_timer again_;  // to accept, when there was no descriptor
  const JobKeys& keys_;
  const Duration silence_;
  const Handlers handlers_;
  struct Node {
    std::shared_ptr<Framed> connection;
    std::string name = "?";  // until it has introduced itself
  };
  std::map<membership::NodeId, Node> nodes_;
  std::map<membership::NodeId, std::shared_ptr<Framed>> strangers_;  // that have not proven the key, oldest first
  Seldom without_descriptors_{std::chrono::seconds(10)};             // a line in the log
  std::map<std::string, Seldom> refusals_;                           // by host: when one was logged last
  Seldom other_hosts_{kRefusalsApart};                               // … where there are too many
  // Recorded of this epoch: by, of, lost.
  std::pair<std::uint64_t, std::set<std::tuple<std::uint32_t, std::uint32_t, bool>>> accusations_;
  std::uint64_t next_node_ = 1, rejected_ = 0;
  std::string address_;
  bool sending_ = false;
  std::set<membership::NodeId> ended_by_send_;                    // of whom `lost` is still to tell
  const std::shared_ptr<bool> there_ = std::make_shared<bool>();  // as long as this is
};

}  // namespace rejoin::daemon
