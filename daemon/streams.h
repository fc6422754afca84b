// Finds out which local ranks serve, which catch up, and from whom, by the coordinator's plan. It is pure.
#pragma once

#include <array>
#include <memory>

#include "base/location.h"
#include "catchup/service.h"
#include "membership/node.h"

namespace rejoin::daemon {

// Returns a stream's address for peers: what it goes over, and where. Only streams of one family reach each other.
std::string stream_address(const std::string& family, const std::string& address);

// A contributor's catch-up stream that goes over another transport than this node's.
struct StrangeStream {
  ReplicaId replica;
  Incarnation incarnation;
  std::string family;
  auto operator<=>(const StrangeStream&) const = default;
};

struct LocalStream {
  membership::RankConnection rank;
  catchup::RankKey key;
  bool catching_up = false;
  std::uint64_t job = 0;
  std::optional<Incarnation> serves;  // its incarnation, where it is a member
  // Where it is catching up: the same rank of all contributors that can be reached, and of other joiners.
  std::set<catchup::SourceAddress> sources;
  catchup::Chain chain;
  std::set<StrangeStream> strange;
};

// `family` is that of this node's own streams (transport/factory.h), and `here` says where the node is.
std::vector<LocalStream> streams_of(const membership::Node& node, const std::string& family, const Location& here = {});

// Keeps the result of streams_of() from plan to plan: a plan comes with each step, and what it follows from changes
// rarely.
class Streams {
 public:
  Streams(std::string family, const Location& here) : family_(std::move(family)), here_(here) {}
  // `other_peers`: the node has heard of peers since the last call. The result is valid until the next one.
  const std::vector<std::shared_ptr<const LocalStream>>& of(const membership::Node& node, bool other_peers);
  std::uint64_t made() const { return made_; }  // how often they were made anew; for tests

 private:
  // What the streams follow from besides peers: numbers of members and of ranks.
  struct Basis {
    std::vector<std::array<std::uint64_t, 3>> members, ranks;
    bool operator==(const Basis&) const = default;
  };
  static Basis basis_of(const membership::Node& node);

  const std::string family_;
  const Location here_;
  std::optional<Basis> basis_;
  std::vector<std::shared_ptr<const LocalStream>> streams_;
  std::uint64_t made_ = 0;
};

// Make the reports of what a stream's thread has found, for the rank's node.
proto::FromNode report_of(const catchup::Service::CompletedRank& completed);
proto::FromNode report_of(const catchup::RankKey& joiner, const catchup::Drift& drift);

}  // namespace rejoin::daemon
