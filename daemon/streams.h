// Which local ranks serve, which catch up, and from whom, as the coordinator's plan says. Pure.
#pragma once

#include "catchup/service.h"
#include "membership/node.h"

namespace rejoin::daemon {

struct LocalStream {
  membership::RankConnection rank;
  catchup::RankKey key;
  bool catching_up = false;
  std::optional<Incarnation> serves;         // it contributes, in this incarnation
  std::set<catchup::SourceAddress> sources;  // the same rank of all contributors
  Step committed;                            // the last step
};

std::vector<LocalStream> streams_of(const membership::Node& node);

// What a stream's thread has found, as the rank's node is told.
proto::FromNode report_of(const catchup::Service::Whole& whole);
proto::FromNode report_of(const catchup::RankKey& joiner, const catchup::Drift& drift);

}  // namespace rejoin::daemon
