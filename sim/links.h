// The control connections between the simulated processes, their two ends, and what goes wrong with their messages.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "sim/process.h"

namespace rejoin::sim {

class Uplink;
struct Station;

struct Link {
  std::uint32_t caller = 0, station = 0;
  TimePoint last_up{}, last_down{};  // deliveries, in order
  bool accepted = false;             // by the station
  bool reset = false;                // nothing arrives any more
  TimePoint forgotten_until{};       // by what lies between: nothing arrives until then; TimePoint::max(): never
};

struct Calling {  // null: it is not there
  Process* process = nullptr;
  Uplink* uplink = nullptr;
};

struct Listening {
  Process* process = nullptr;
  Station* station = nullptr;
};

struct Interruption {  // of an introduction
  std::uint64_t messages = 0;
  Duration lasting{};
};

struct SlowLink {
  Duration out{}, in{};  // what its messages take longer
  TimePoint until{};
};

}  // namespace rejoin::sim
