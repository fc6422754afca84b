// What the kernel has measured on a connection.
#pragma once

#include <cstdint>
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

struct Traffic {
  bool under_way = false;          // the peer's kernel has not acknowledged all that was handed to ours
  bool held_back = false;          // because its process does not read: what it has room for it has acknowledged
  std::uint64_t acknowledged = 0;  // bytes
  std::uint32_t segments = 0;      // that have come from there, those without data among them
};
// Nothing: the kernel does not tell.
std::optional<Traffic> traffic_of(const Fd& socket);

}  // namespace rejoin::transport::tcp
