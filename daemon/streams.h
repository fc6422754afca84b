// Which local ranks serve, which catch up, and from whom, as the coordinator's plan says. Pure.
#pragma once

#include "base/location.h"
#include "catchup/service.h"
#include "membership/node.h"

namespace rejoin::daemon {

// A stream's address, for peers: what it goes over, and where. Only streams of one family reach each other.
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
  std::optional<Incarnation> serves;         // it is a member, in this incarnation
  std::set<catchup::SourceAddress> sources;  // the same rank of all contributors that can be reached
  catchup::Chain chain;                      // … of joiners, where this one is catching up
  std::set<StrangeStream> strange;
  Step committed;  // the last step
};

// `family`: of this node's own streams (transport/factory.h). `here`: where it is.
std::vector<LocalStream> streams_of(const membership::Node& node, const std::string& family, const Location& here = {});

// What a stream's thread has found, for the rank's node.
proto::FromNode report_of(const catchup::Service::CompletedRank& completed);
proto::FromNode report_of(const catchup::RankKey& joiner, const catchup::Drift& drift);

}  // namespace rejoin::daemon
