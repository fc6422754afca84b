// Settings of sessions whose daemons these tests have started.
#pragma once

#include "rejoin/session.h"
#include "tests/daemons.h"

namespace rejoin::test {

inline SessionConfig config_of(const Daemons& daemons, std::uint32_t replica, std::uint32_t rank = 0) {
  SessionConfig config;
  config.flight = "off";
  config.replica = replica;
  config.rank = rank;
  config.socket = daemons.socket(replica);
  return config;
}

}  // namespace rejoin::test
