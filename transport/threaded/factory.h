// An engine on a thread of its own: what its owner posts goes to that thread, which polls the engine below, and what
// happens comes back. So a process moves bytes, and encrypts them, with several cores: with a rail on its own thread
// and others on others, as one engine (striped/). What is no bulk waits here for two threads to be woken, which costs
// more than it brings.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rejoin::transport::threaded {

// `below` must have a descriptor to sleep on. Calls that need an answer (connect(), register_region(), close() …) wait
// for the thread; send(), write(), read(), poll() and arm() do not. What was
// outstanding on an endpoint that is closed completes in a later poll(), not always in the next. Errors:
// `invalid_argument`; of the system.
Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Engine> below);

}  // namespace rejoin::transport::threaded
