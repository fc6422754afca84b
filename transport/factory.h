// One way to get an engine by its name, for configuration and flags.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace rejoin::transport {

// "shm": UCX over shared memory, inside one node. "tcp": our TCP backend. "ucx:LIST": UCX over the transports listed
// (UCX's names, comma-separated).
Result<std::unique_ptr<Engine>> make_engine(const std::string& name);

}  // namespace rejoin::transport
