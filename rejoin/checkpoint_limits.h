// What both ends of a checkpoint's transfer know of each other beforehand (checkpoint_transfer.h).
#pragma once

#include <array>
#include <cstring>
#include <string_view>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/proof.h"

namespace rejoin {

inline constexpr std::string_view kCheckpointScheme = "rejoin-checkpoint-1";
inline constexpr std::string_view kNoCheckpointServer =
    "address of a checkpoint server: give what its address() has returned";

constexpr std::uint64_t kMostContents = 256 * MiB;               // of the list of buffers, with the description
constexpr Duration kLookAround = std::chrono::milliseconds(50);  // between two looks at whether a wait is cancelled

using CheckpointSecret = std::array<std::uint64_t, 2>;  // the address's

// The end of a secret tells that its server proves what it offers, and takes a hello that does not show the secret to
// whoever overhears it. Those of before have other ends, but for one in 65,536; they take the secret itself.
constexpr std::uint64_t kProves = 0x7072, kProvesMask = 0xffff;
constexpr bool proves(const CheckpointSecret& secret) { return (secret[1] & kProvesMask) == kProves; }

inline CheckpointSecret checkpoint_hello(const CheckpointSecret& secret) {
  const Mac mac = mac_of(bytes_of(secret), {as_bytes("rejoin checkpoint: hello")});
  CheckpointSecret hello{};
  std::memcpy(hello.data(), mac.data(), sizeof hello);
  return hello;
}

// Of the description, and of the buffers with their digests. What has the description may run what is in it, as
// Python's pickle does, and on most transports who is on the way could change it.
inline Mac proof_of_contents(const CheckpointSecret& secret, std::uint64_t step, BytesView contents) {
  return mac_of(bytes_of(secret), {as_bytes("rejoin checkpoint: contents"), bytes_of(step), contents});
}

}  // namespace rejoin
