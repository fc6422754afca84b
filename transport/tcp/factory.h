// The TCP backend, for nodes without RDMA. Its own rather than UCX's, because UCX goes on landing a rendezvous write
// after its endpoint was closed, and so can't fence (transport/tests/conformance_fence_test.cc shows it). Here a closed
// socket is the fence.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace rejoin::transport::tcp {

struct Options {
  // Local address that connections come from and listen() uses, whatever host it is given: the rail. Empty: any.
  std::string local;
  // … asked for at each connection, where it may change. Empty: any.
  std::function<std::string()> local_now{};
  // Others carry on where its address is of no interface: it listens there, and is reached as soon as it is of one.
  bool one_of_several = false;
  bool encrypt = false;  // all connections: see records.h. Both sides must
  bool kernel = false;   // … by the kernel, where it can and the other side wants it, too (kernel_tls.h)
};

// Errors: `exhausted` where the process is out of descriptors.
Result<std::unique_ptr<Engine>> make_engine(const Options& options);

}  // namespace rejoin::transport::tcp
