// The shared-memory backend, for ranks of one node. Its own rather than UCX's, because UCX 1.13 has no error handling
// on shared memory (its posix transport lacks "peer failure"): an endpoint to a dead or stopped process can neither be
// closed by force nor fenced. Here messages go through rings in a memfd, bulk is pulled by the receiver out of the
// sender's memory (its memfd, mapped; else process_vm_readv), and a unix socket tells at once when the peer's process
// ends.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rejoin::transport::shm {

// Errors: `unavailable` where /proc is not mounted; those of the system's calls.
Result<std::unique_ptr<Engine>> make_engine();

}  // namespace rejoin::transport::shm
