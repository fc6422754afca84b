#include "sim/scale.h"

#include <time.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <unordered_map>

#include "base/bytes.h"
#include "base/fail.h"
#include "membership/node.h"
#include "membership/prospect.h"
#include "membership/relay.h"
#include "sim/heap.h"

namespace rejoin::sim {

namespace {

using membership::NodeId;
using membership::RankConnection;

constexpr std::size_t kFrame = 16 * MiB;  // daemon/framed.h: the most that a peer takes

double cpu_ms() {
  timespec spent{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return static_cast<double>(spent.tv_sec) * 1e3 + static_cast<double>(spent.tv_nsec) * 1e-6;
}

class Cluster {
 public:
  explicit Cluster(const ScaleOptions& options)
      : o_(options),
        nodes_per_replica_((o_.ranks + o_.ranks_per_node - 1) / o_.ranks_per_node),
        coordinator_(std::make_unique<membership::Coordinator>(
            membership::JobConfig{.replicas = o_.replicas,
                                  .ranks = o_.ranks,
                                  .batch = 1,
                                  .steps = 0,
                                  .silence = std::chrono::nanoseconds(10),  // nobody waits for a tick
                                  .links = {.full_mesh_members = o_.full_mesh_members}})) {
    nodes_.resize(std::size_t{o_.replicas} * nodes_per_replica_);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      nodes_[i].machine = std::make_unique<membership::Node>("n", std::chrono::seconds(10), i + 1);
      nodes_[i].replica = static_cast<std::uint32_t>(i / nodes_per_replica_);
    }
    relays_.resize(o_.relays ? o_.replicas : 0);
    for (auto& relay : relays_) relay.machine = std::make_unique<membership::Relay>("r", std::chrono::seconds(10));
    ranks_.resize(std::size_t{o_.replicas} * o_.ranks);
  }

  ScaleResult run() {
    ScaleResult result{.ranks = ranks_.size(), .nodes = nodes_.size()};
    start();
    result.start_ms = meter_.cpu_ms;
    result.start_bytes = meter_.bytes;
    forget_loads();
    const auto before = coordinator_->committed().value;
    for (std::uint32_t i = 0; i < o_.steps; ++i) step();
    REJOIN_CHECK(coordinator_->committed().value == before + o_.steps, "a step was not committed");
    result.coordinator = per_step(meter_, 1);
    for (const auto& relay : relays_) add(result.relay, per_step(relay.meter, relays_.size()));
    for (const auto& node : nodes_) add(result.node, per_step(node.meter, nodes_.size()));

    // One process of the last replica ends; its others are evicted and end too, and all come back.
    forget_loads();
    const std::uint32_t lost = o_.replicas - 1;
    const auto epoch = coordinator_->epoch();
    messages_ = 0;
    lose(lost);
    REJOIN_CHECK(coordinator_->epoch() == epoch.next(), "the epoch did not change");
    result.epoch_change_ms = meter_.cpu_ms;
    result.epoch_change_messages = messages_;
    bring_back(lost);
    result.replica_ms = meter_.cpu_ms;
    step();
    REJOIN_CHECK(coordinator_->members().size() == o_.replicas, "the replica was not admitted");
    result.largest_message = largest_message_;
    const LinkRule rule{.full_mesh_members = o_.full_mesh_members};
    std::size_t links = 0;
    for (std::uint32_t i = 0; i < o_.replicas; ++i) links += links_of(rule, i, o_.replicas, o_.replicas).size();
    result.links = static_cast<double>(links) / o_.replicas;
    const std::uint64_t with = heap_bytes();
    coordinator_.reset();
    result.coordinator_bytes_per_rank = static_cast<double>(with - heap_bytes()) / static_cast<double>(ranks_.size());
    return result;
  }

  Kept keep(const std::function<std::uint64_t()>& held) {
    start();
    const auto kept_after = [&](std::uint32_t steps) {
      while (coordinator_->committed().value < steps) {
        const auto committed = coordinator_->committed().value;
        const auto victim = static_cast<std::uint32_t>(committed / 10 % o_.replicas);
        if (committed % 10 == 5) lose(victim), bring_back(victim), step(), catch_up(victim);
        for (int i = 0; i < 3 && coordinator_->committed().value == committed; ++i) step();  // again in a new epoch
        REJOIN_CHECK(coordinator_->committed().value > committed, "step {} was not committed", committed + 1);
      }
      const std::uint64_t all = held();
      const membership::Ledger ledger = coordinator_->ledger();
      return all - (held() - all);  // a copy weighs what it does
    };
    return {kept_after(o_.steps), kept_after(10 * o_.steps)};
  }

 private:
  void start() {
    (void)coordinator_->recover({}, now_);
    for (std::uint32_t r = 0; r < relays_.size(); ++r) carry_out(r, relays_[r].machine->on_coordinator_up(now_));
    for (std::size_t n = 0; n < nodes_.size(); ++n) carry_out(n, nodes_[n].machine->on_coordinator_up(now_));
    for (std::uint32_t replica = 0; replica < o_.replicas; ++replica) {
      spawn(replica);
      drain();  // what is under way of all of them at once would not fit this machine's memory
    }
    REJOIN_CHECK(coordinator_->started(), "the job did not start");
  }
  void lose(std::uint32_t replica) {
    end_rank(replica, 0, "killed");
    drain();
  }
  void bring_back(std::uint32_t replica) {
    for (std::uint32_t rank = 1; rank < o_.ranks; ++rank) end_rank(replica, rank, "evicted");
    drain();
    forget_loads();
    now_ += std::chrono::seconds(1);
    spawn(replica);
    drain();
  }

  void catch_up(std::uint32_t replica) {
    for (std::size_t rank = std::size_t{replica} * o_.ranks; rank < std::size_t{replica + 1} * o_.ranks; ++rank) {
      proto::FromNode message;
      message.mutable_caught_up()->set_instance(ranks_[rank].instance);
      send(rank, message);
    }
    drain();
  }

  struct Meter {
    double cpu_ms = 0;
    std::uint64_t messages = 0, bytes = 0;
  };
  struct NodeProcess {
    std::unique_ptr<membership::Node> machine;
    std::uint32_t replica = 0;
    Meter meter;
  };
  struct RelayProcess {
    std::unique_ptr<membership::Relay> machine;
    Meter meter;
  };
  struct RankProcess {
    RankConnection connection;
    std::uint64_t instance = 0, incarnation = 0, epoch = 0, step = 0;
    bool to_report = false;  // a reduction
    bool member = false;
    LinkRule rule;
    membership::Incarnations links;
  };
  enum class To { coordinator, relay_up, relay_down, node, rank };
  struct Message {
    To to{};
    std::size_t index = 0;
    std::uint64_t from = 0;  // connection, on the way up
    std::string bytes;
  };
  // Adds what passes while it lives.
  struct Counting {
    explicit Counting(Meter& counted) : meter(counted) {}
    ~Counting() { meter.cpu_ms += cpu_ms() - start; }
    Meter& meter;
    const double start = cpu_ms();
  };

  // Connections: 1 + index of a relay, or 1'000'000 + index of a node.
  static constexpr std::uint64_t kNodes = 1'000'000;

  template <typename T>
  void post(Meter& meter, To to, std::size_t index, std::uint64_t from, const T& message) {
    post(meter, to, index, from, message.SerializeAsString());
  }
  void post(Meter& meter, To to, std::size_t index, std::uint64_t from, const std::string& bytes) {
    REJOIN_CHECK(bytes.size() <= kFrame, "a message of {} bytes fits no frame", bytes.size());
    largest_message_ = std::max(largest_message_, bytes.size());
    queue_.push_back({to, index, from, bytes});
    ++meter.messages, ++messages_;
    meter.bytes += queue_.back().bytes.size();
  }
  template <typename T>
  static T parse(Meter& meter, const Message& message) {
    T parsed;
    REJOIN_CHECK(parsed.ParseFromString(message.bytes));
    ++meter.messages;
    meter.bytes += message.bytes.size();
    return parsed;
  }

  void carry_out(const membership::Actions& actions) {
    for (const auto& [ids, message] : actions.send) {
      const std::string bytes = message.SerializeAsString();
      for (auto id : ids) {
        if (id.value >= kNodes) post(meter_, To::node, id.value - kNodes, 0, bytes);
        else post(meter_, To::relay_down, id.value - 1, 0, bytes);
      }
    }
  }
  void carry_out(std::size_t relay, const membership::Relay::Actions& actions) {
    Meter& meter = relays_[relay].meter;
    for (const auto& message : actions.to_coordinator) post(meter, To::coordinator, 0, relay + 1, message);
    for (const auto& [ids, message] : actions.to_nodes) {
      const std::string bytes = message.SerializeAsString();
      for (auto id : ids) post(meter, To::node, id.value - kNodes, 0, bytes);
    }
  }
  void carry_out(std::size_t node, const membership::Node::Actions& actions) {
    Meter& meter = nodes_[node].meter;
    for (const auto& message : actions.to_coordinator)
      post(meter, relays_.empty() ? To::coordinator : To::relay_up, nodes_[node].replica, kNodes + node, message);
    for (const auto& [connection, message] : actions.to_ranks)
      if (const auto rank = by_connection_.find(connection.value); rank != by_connection_.end())
        post(meter, To::rank, rank->second, 0, message);
  }

  void drain() {
    while (!queue_.empty()) {
      const Message message = std::move(queue_.front());
      queue_.pop_front();
      switch (message.to) {
        case To::coordinator: {
          const Counting counting(meter_);
          carry_out(coordinator_->on_message(NodeId(message.from), parse<proto::FromNode>(meter_, message), now_));
          break;
        }
        case To::relay_up: {
          RelayProcess& relay = relays_[message.index];
          const Counting counting(relay.meter);
          const auto parsed = parse<proto::FromNode>(relay.meter, message);
          carry_out(message.index, relay.machine->on_node_message(NodeId(message.from), parsed, now_));
          break;
        }
        case To::relay_down: {
          RelayProcess& relay = relays_[message.index];
          const Counting counting(relay.meter);
          const auto parsed = parse<proto::ToNode>(relay.meter, message);
          carry_out(message.index, relay.machine->on_coordinator_message(parsed, now_));
          break;
        }
        case To::node: {
          NodeProcess& node = nodes_[message.index];
          const Counting counting(node.meter);
          carry_out(message.index,
                    node.machine->on_coordinator_message(parse<proto::ToNode>(node.meter, message), now_));
          break;
        }
        case To::rank: hear(message.index, message.bytes);
      }
    }
  }

  // ---- ranks
  std::size_t node_of(std::size_t rank) const {
    return rank / o_.ranks * nodes_per_replica_ + rank % o_.ranks / o_.ranks_per_node;
  }
  void send(std::size_t rank, const proto::FromNode& message) {
    const std::size_t node = node_of(rank);
    const Counting counting(nodes_[node].meter);
    nodes_[node].meter.bytes += message.ByteSizeLong();
    ++nodes_[node].meter.messages;
    carry_out(node, nodes_[node].machine->on_rank_message(ranks_[rank].connection, message, now_));
  }
  void spawn(std::uint32_t replica) {
    for (std::uint32_t number = 0; number < o_.ranks; ++number) {
      const std::size_t index = std::size_t{replica} * o_.ranks + number;
      RankProcess& rank = ranks_[index];
      rank = {.connection = RankConnection(++connections_), .instance = ++instances_};
      by_connection_[rank.connection.value] = index;
      proto::FromNode message;
      auto& up = *message.mutable_rank_up();
      up.set_replica(replica);
      up.set_rank(number);
      up.set_instance(rank.instance);
      std::string rails;
      for (std::uint32_t rail = 0; rail < o_.rails; ++rail)
        rails += fmt::format("{}10.{}.{}.{}:{}", rail > 0 ? "|" : "", replica % 256, number / 256, number % 256,
                             40000 + rail);
      up.set_address(rails);
      up.set_stream_address(rails);
      up.set_plan_hash(7);
      up.set_digest(0x1234567812345678);
      up.set_pid(4242);
      send(index, message);
    }
  }
  void end_rank(std::uint32_t replica, std::uint32_t number, const std::string& why) {
    const std::size_t index = std::size_t{replica} * o_.ranks + number, node = node_of(index);
    by_connection_.erase(ranks_[index].connection.value);
    carry_out(node, nodes_[node].machine->on_rank_gone(ranks_[index].connection, why, membership::Node::Gone::ended));
  }
  void hear(std::size_t index, const std::string& bytes) {
    RankProcess& rank = ranks_[index];
    proto::ToNode received;
    REJOIN_CHECK(received.ParseFromString(bytes));
    if (received.has_registered()) {
      rank.incarnation = received.registered().incarnation();
      rank.rule = membership::rule_in(received.registered());
    }
    // Where not all are connected with each other, it is so with those of the prospect at once, and then no member says
    // with whom it is.
    if (received.has_prospect() && !rank.member) {
      rank.links = membership::links_of_candidate(rank.rule, received.prospect(), rank.incarnation);
      report_links(index);
    }
    if (received.has_peers() && !rank.rule.full_mesh_members) {
      if (received.peers().complete_size() > 0) rank.links.clear();
      membership::Incarnations gone;
      for (auto incarnation : received.peers().gone()) gone.insert(incarnation);
      rank.links.remove(gone);
      for (const auto& peer : received.peers().peers()) rank.links.insert(peer.incarnation());
      report_links(index);
    }
    if (!received.has_plan()) return;
    for (const auto& member : received.plan().members())
      if (member.incarnation() == rank.incarnation) {
        rank.epoch = received.plan().epoch();
        rank.step = received.plan().step();
        rank.to_report = rank.member = true;
      }
  }
  void report_links(std::size_t index) {
    proto::FromNode message;
    auto& links = *message.mutable_links();
    links.set_replica(static_cast<std::uint32_t>(index / o_.ranks));
    links.set_rank(static_cast<std::uint32_t>(index % o_.ranks));
    links.set_instance(ranks_[index].instance);
    ranks_[index].links.to(links.mutable_incarnations());
    send(index, message);
  }
  void step() {
    for (std::size_t index = 0; index < ranks_.size(); ++index) {
      RankProcess& rank = ranks_[index];
      if (!std::exchange(rank.to_report, false)) continue;
      proto::FromNode message;
      auto& reduced = *message.mutable_reduced();
      reduced.set_replica(static_cast<std::uint32_t>(index / o_.ranks));
      reduced.set_epoch(rank.epoch);
      reduced.set_step(rank.step);
      membership::RankSet(static_cast<std::uint32_t>(index % o_.ranks)).to(reduced.mutable_ranks());
      reduced.add_results(0x9e3779b97f4a7c15 * (index % o_.ranks + 1));
      reduced.add_state(0xbf58476d1ce4e5b9 * (index % o_.ranks + 1));
      send(index, message);
    }
    drain();
  }

  Load per_step(const Meter& meter, std::size_t machines) const {
    const double n = static_cast<double>(o_.steps) * static_cast<double>(machines);
    return {meter.cpu_ms / n, static_cast<double>(meter.messages) / n, static_cast<double>(meter.bytes) / n};
  }
  static void add(Load& sum, const Load& one) {
    sum = {sum.cpu_ms + one.cpu_ms, sum.messages + one.messages, sum.bytes + one.bytes};
  }
  void forget_loads() {
    meter_ = {};
    for (auto& relay : relays_) relay.meter = {};
    for (auto& node : nodes_) node.meter = {};
  }

  const ScaleOptions o_;
  const std::uint32_t nodes_per_replica_;
  TimePoint now_{std::chrono::seconds(1)};
  std::unique_ptr<membership::Coordinator> coordinator_;
  Meter meter_;  // the coordinator's
  std::vector<RelayProcess> relays_;
  std::vector<NodeProcess> nodes_;
  std::vector<RankProcess> ranks_;
  std::unordered_map<std::uint64_t, std::size_t> by_connection_;
  std::deque<Message> queue_;
  std::uint64_t connections_ = 0, instances_ = 0, messages_ = 0;
  std::size_t largest_message_ = 0;
};

}  // namespace

Kept measure_kept(const ScaleOptions& options, const std::function<std::uint64_t()>& held) {
  return Cluster(options).keep(held);
}

ScaleResult measure_scale(const ScaleOptions& options) {
  // All machines share one heap here, and none should pay for what another gives back to the kernel.
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  ::mallopt(M_TOP_PAD, 64 << 20);
  ::mallopt(M_MXFAST, 0);
  return Cluster(options).run();
}

}  // namespace rejoin::sim
