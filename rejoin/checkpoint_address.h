// What a CheckpointServer's address says (checkpoint_transfer.h), and what both ends know of each other beforehand.
#pragma once

#include <string>

#include "base/bytes.h"
#include "base/result.h"

namespace rejoin {

constexpr std::uint64_t kMostContents = 256 * MiB;  // of the list of buffers, with the description

struct CheckpointHello {
  std::uint64_t secret[2];
};

// "rejoin-checkpoint-1 SECRET TRANSPORT ADDRESS"; the last is the transport's own, and may have spaces.
struct CheckpointAddress {
  CheckpointHello hello{};
  std::string transport, address;

  std::string text() const;
  static Result<CheckpointAddress> parse(const std::string& text);  // errors: `invalid_argument`
};

}  // namespace rejoin
