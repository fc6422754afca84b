// What the kernel has measured on a connection.
#pragma once

#include <optional>

#include "base/clock.h"
#include "base/fd.h"

namespace rejoin::transport::tcp {

// The least round trip of the last minutes; its first ones are those in which it was connected. Nothing: the kernel
// does not tell.
std::optional<Duration> least_round_trip(const Fd& socket);

// How many bytes the peer's kernel has acknowledged, while there are some that it has not, even after they were sent
// again: its answer may take a while. Nothing: there are none, or the kernel does not tell.
std::optional<std::uint64_t> acknowledged_of_more(const Fd& socket);

}  // namespace rejoin::transport::tcp
