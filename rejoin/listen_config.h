// Says how a process listens that others connect to without a coordinator: a checkpoint server (checkpoint_transfer.h)
// or a member of a process group (process_group.h).
#pragma once

#include <string>

#pragma GCC visibility push(default)
namespace rejoin {

struct ListenConfig {
  std::string transport = "tcp";  // as in transport/factory.h; who connects has one of the same family
  std::string listen{};           // HOST:PORT, port 0: the system picks one; empty: any, over IPv4 and IPv6
  std::string advertise;          // the host that others reach this one at; empty: this machine's own address
  // Where this machine has several, the one from which it reaches this address (HOST:PORT, no name); empty: the one on
  // the default route, or else an interface's.
  std::string towards{};
};

}  // namespace rejoin

#pragma GCC visibility pop
