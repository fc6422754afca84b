// The UCX backend: shared memory inside a node, and whatever RDMA UCX finds (TCP has a backend of its own).
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace rejoin::transport::ucx {

struct Options {
  // UCX's names of the transports to use, e.g. "posix,cma,self" (one node), "tcp,self", "all", or those not to use:
  // "^rc".
  std::string transports = "posix,cma,self";
  // Writes above this go by rendezvous: the receiver pulls them, so it alone decides what lands.
  std::size_t rendezvous_threshold = 16 * KiB;
};

// Whether UCX may use its TCP, by such a list. A list of what not to use leaves it open.
bool may_use_tcp(const std::string& transports);

// Errors: `unavailable` where UCX can't be started with these transports.
Result<std::unique_ptr<Engine>> make_engine(const Options& options);

}  // namespace rejoin::transport::ucx
