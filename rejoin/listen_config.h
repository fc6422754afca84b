// Says how a process listens that others connect to without a coordinator: a checkpoint server (checkpoint_transfer.h)
// or a member of a process group (process_group.h).
#pragma once

#include <string>

#pragma GCC visibility push(default)
namespace rejoin {

struct ListenConfig {
  std::string transport = "tcp";     // as in transport/factory.h; who connects has one of the same family
  std::string listen = "0.0.0.0:0";  // port 0: the system picks one
  std::string advertise;             // the host that others reach this one at; empty: this machine's own address
};

}  // namespace rejoin

#pragma GCC visibility pop
