// The messages of a group (group.h), byte for byte. Two members speak the newest version that both do, whatever the
// other members speak. What each has changed:
//
//   2  all-to-alls have a transfer of 0 bytes, too, so that a pair hears where one expects nothing and the other sends
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/group.h"

namespace rejoin::collectives {

constexpr std::uint32_t kOldest = 1, kNewest = 2;

// What comes with a connection. That of a later version begins with the same fields, so that either side can say whose
// version the other does not speak. Who speaks 1 alone takes nothing behind the rank, and closes the connection; then
// it is called again, with the beginning alone, and that connection speaks `oldest`.
struct Group::Hello {
  std::array<std::uint64_t, 2> secret{};  // of who is connected to
  std::uint64_t number = 0, digest = 0;   // of the configuration
  std::uint32_t oldest = kOldest, rank = 0;
  std::uint32_t newest = kNewest, unused = 0;
  // Of the members' secrets alone: where one is, others may know differently. 0: not given, by releases before.
  std::uint64_t members = 0;
};
constexpr std::size_t kFirstHelloBytes = 40;        // up to the rank
constexpr std::size_t kHelloWithVersionBytes = 48;  // up to what is not used

enum class Message : std::uint8_t {
  welcome,   // the newest version that the higher rank speaks; from one that speaks 1 nothing more
  ready,     // Ready
  payload,   // the receiver's number of the transfer, and the bytes
  abort,     // an ErrorCode in a byte, and the reason
  goodbye,   // one more byte where the member that leaves has had all others here
  farewell,  // nothing more
};

// A receiver is ready for one transfer of an operation.
struct Group::Ready {
  std::uint64_t ordinal = 0;  // of the operation: among the collectives, or among those of this tag and direction
  std::uint64_t id = 0;       // the receiver's, comes back with the bytes
  std::uint64_t length = 0;   // bytes
  std::uint64_t key = 0, region_bytes = 0, offset = 0;  // where to write them; 0: they come in a message
  Signature signature;
  std::uint32_t tag = 0;
  std::uint32_t index = 0;  // among the transfers from this sender in the operation
};

// Up to here bytes come in a message: no memory has to be registered for them.
constexpr std::uint64_t kMessageBytes = 4 * KiB;

}  // namespace rejoin::collectives
