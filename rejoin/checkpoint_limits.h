// What both ends of a checkpoint's transfer know of each other beforehand (checkpoint_transfer.h).
#pragma once

#include <array>
#include <string_view>

#include "base/bytes.h"
#include "base/clock.h"

namespace rejoin {

inline constexpr std::string_view kCheckpointScheme = "rejoin-checkpoint-1";
inline constexpr std::string_view kNoCheckpointServer =
    "address of a checkpoint server: give what its address() has returned";

constexpr std::uint64_t kMostContents = 256 * MiB;               // of the list of buffers, with the description
constexpr Duration kLookAround = std::chrono::milliseconds(50);  // between two looks at whether a wait is cancelled

using CheckpointHello = std::array<std::uint64_t, 2>;  // the secret

}  // namespace rejoin
