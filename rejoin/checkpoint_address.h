// What both ends of a checkpoint's transfer have alike: what a CheckpointServer's address says (checkpoint_transfer.h),
// and what both ends know of each other beforehand.
#pragma once

#include <string>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/result.h"

namespace rejoin {

constexpr std::uint64_t kMostContents = 256 * MiB;               // of the list of buffers, with the description
constexpr Duration kLookAround = std::chrono::milliseconds(50);  // between two looks at whether a wait is cancelled

struct CheckpointHello {
  std::uint64_t secret[2];
};

// "rejoin-checkpoint-1 SECRET FAMILY ADDRESS"; the last is the transport's own, and may have spaces.
struct CheckpointAddress {
  CheckpointHello hello{};
  std::string family;  // of the transport, as family_of() says it
  std::string address;

  std::string text() const;
  static std::string family_of(const std::string& transport);
  static Result<CheckpointAddress> parse(const std::string& text);  // errors: `invalid_argument`
};

}  // namespace rejoin
