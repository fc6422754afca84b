// A node's daemon, between a coordinator and trainers that are a test's.
#pragma once

#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/node_listener.h"
#include "daemon/node_server.h"
#include "daemon/tests/meeting.h"
#include "device/remote_wire.h"
#include "local/offer.h"
#include "local/owner.h"
#include "membership/rank.h"

namespace rejoin::daemon {

using std::chrono::milliseconds;

inline proto::FromTrainer heartbeat() {
  proto::FromTrainer message;
  message.mutable_report()->mutable_heartbeat();
  return message;
}

// A trainer without an engine: what it is sent lies in its socket until it is asked for.
struct RawTrainer {
  explicit RawTrainer(const std::string& name) : socket(std::move(*connect_unix(name))) {}
  explicit RawTrainer(Fd connected) : socket(std::move(connected)) {}

  void say(const proto::FromTrainer& message, const std::vector<int>& fds = {}) const {
    EXPECT_TRUE(send_with_fds(socket, as_bytes(message.SerializeAsString()), fds));
  }
  void register_as(std::uint32_t replica) {
    const auto offer = *owner.offer();
    std::vector<int> fds;
    for (const auto& fd : offer) fds.push_back(fd.get());
    register_as(replica, fds);
  }
  // Its state is on a GPU, whose memory nobody serves.
  void register_as_of_gpu(std::uint32_t replica) {
    auto offer = *local::unpack(*owner.offer());
    const auto on_gpu = [](std::vector<device::Handle>& handles) {
      std::uint64_t address = 1 << 20;
      for (auto& handle : handles) {
        handle.kind = device::Handle::Kind::address;
        handle.address = std::exchange(address, address + handle.size);
      }
    };
    on_gpu(offer.shadow.handles);
    for (auto& range : offer.memory_ranges) on_gpu(range.handles);
    const auto all = *local::pack(std::move(offer));
    int line[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, line), 0);
    const Fd there(line[1]), memory = *make_sealed_memfd("of a line", device::remote::kMemoryBytes);
    here = Fd(line[0]);
    std::vector<int> fds;
    for (const auto& fd : all) fds.push_back(fd.get());
    fds.insert(fds.end(), {there.get(), memory.get()});
    register_as(replica, fds, "cuda:test");
  }
  void register_as(std::uint32_t replica, const std::vector<int>& fds, const std::string& device = "host") const {
    proto::FromTrainer message;
    auto& hello = *message.mutable_hello();
    membership::Versions().put_into(hello);
    hello.set_layout(local::kLayoutVersion);
    hello.set_descriptors(static_cast<std::uint32_t>(fds.size()));
    hello.set_device(device);
    hello.mutable_up()->set_replica(replica);
    hello.mutable_up()->set_instance(instance.value_or(replica + 1));
    hello.mutable_up()->set_address(listens);
    hello.mutable_up()->set_card(card);
    hello.mutable_up()->set_card_listening(card_listening);
    say(message, fds);
  }
  std::optional<proto::ToTrainer> hear() const {
    const auto received = receive_with_fds(socket, 512 * KiB);
    EXPECT_TRUE(received) << received.error().message;
    if (!received || !*received) return std::nullopt;
    proto::ToTrainer message;
    EXPECT_TRUE(message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())));
    return message;
  }
  bool hung_up() const {
    pollfd look{socket.get(), POLLRDHUP, 0};
    return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP)) != 0;
  }
  int unread() const {  // bytes that it has sent, with what the system adds
    int bytes = 0;
    EXPECT_EQ(::ioctl(socket.get(), SIOCOUTQ, &bytes), 0);
    return bytes;
  }

  local::Owner owner = *local::Owner::make(*local::Manifest::make({{.name = "w", .count = 64, .columns = 1}}));
  Fd socket;
  Fd here;                              // the end of its GPU's line
  std::string listens = "127.0.0.1:1";  // what it says of an engine
  std::string card, card_listening;
  std::optional<std::uint64_t> instance;
};

struct OneNode : testing::Test {
  void start(milliseconds silence, const std::string& transport = "shm",
             const NodeOptions& more = {.advertise = "127.0.0.1"}) {
    ASSERT_TRUE(coordinator.listen("127.0.0.1:0"));
    auto started = NodeServer::start(io,
                                     {.socket = socket,
                                      .coordinator = coordinator.address(),
                                      .transport = transport,
                                      .data_listen = more.data_listen,
                                      .advertise = more.advertise,
                                      .silence = silence},
                                     keys);
    ASSERT_TRUE(started) << started.error().message;
    server = std::move(*started);
    ASSERT_TRUE(comes_true([this] { return node != membership::NodeId{}; }));
  }
  bool comes_true(const std::function<bool()>& condition) {
    const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
    while (SteadyClock().now() < deadline) {
      if (condition()) return true;
      io.run_one_for(milliseconds(10));
    }
    return false;
  }
  void register_as(std::uint32_t replica, RawTrainer& trainer) {
    trainer.register_as(replica);
    ASSERT_TRUE(comes_true([&] {
      const auto heard = trainer.hear();
      return heard && heard->has_welcome();
    }));
  }
  // Its first report of a process that is gone; the end: there is none.
  auto down() const { return std::ranges::find_if(reports, &proto::FromNode::has_rank_down); }
  // Of a large job, about 0.5 MiB.
  void tell_of_peers() {
    proto::ToNode message;
    membership::RankSet(0).to(message.mutable_peers()->mutable_complete());
    for (std::uint32_t replica = 1; replica <= 500; ++replica) {
      auto& peer = *message.mutable_peers()->add_peers();
      peer.set_replica(replica);
      peer.set_incarnation(replica);
      peer.set_card(std::string(membership::kMostCardBytes, 'c'));
    }
    coordinator.send(node, message.SerializeAsString());
    ++lists;
  }

  asio::io_context io{1};
  JobKeys keys{test::kKey};
  membership::NodeId node{};
  std::vector<proto::FromNode> reports;
  int lists = 0;
  NodeListener coordinator{io,
                           keys,
                           std::chrono::seconds(2),
                           {.message =
                                [this](membership::NodeId from, const proto::FromNode& message) {
                                  node = from;
                                  reports.push_back(message);
                                },
                            .lost = [](auto) {}}};
  const std::string socket = "@node_server_test." + std::to_string(::getpid());
  std::unique_ptr<NodeServer> server;
};

}  // namespace rejoin::daemon
