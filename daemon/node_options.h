// What the daemon of one node is told.
#pragma once

#include <chrono>
#include <string>

#include "base/deadlines.h"

namespace rejoin::daemon {

struct NodeOptions {
  std::string name = "node";
  std::string location;           // where the node stands (base/location.h); empty: nobody has said
  std::string socket;             // where trainers connect
  std::string coordinator;        // host:port of each, with commas between; or a relay's
  std::string transport = "shm";  // of the catch-up stream
  std::string data_listen = "127.0.0.1:0";
  std::string advertise;  // hosts that peers connect to instead of the one listened on: see transport/advertise.h
  std::string compression = "auto";  // of the catch-up stream: off, auto, always
  double stream_limit = 0;           // MB/s that it may use; 0: no limit
  std::string numa = "auto";         // its threads run near NICs and GPUs; off: anywhere
  std::chrono::milliseconds silence = deadlines::kSilence;
};

}  // namespace rejoin::daemon
