// Striping: one engine over several rails (engines of one backend, each on its own NIC port or path). Writes and reads
// travel in pieces over whichever rail has room; a rail that dies is taken out, its unfinished pieces go over the
// others, and it is tried again until it comes back. An endpoint fails only with its last rail.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/deadlines.h"
#include "transport/transport.h"

namespace rejoin::transport::striped {

constexpr std::size_t kMaxRails = 16;

struct Options {
  std::size_t largest_piece = 1 * MiB;    // bytes; what a dying rail can cost, and the grain of balancing
  std::size_t smallest_piece = 64 * KiB;  // below it, splitting costs more than a second rail brings
  std::size_t bytes_in_flight = 8 * MiB;  // per rail and endpoint; the rest waits here, for whichever rail is first
  // The rails from this one on are slow to begin, though not to go on: while others are up they carry only pieces of
  // operations of at least so many bytes, and no messages.
  std::size_t first_bulk_rail = kMaxRails, least_bulk = 512 * KiB;
  // A rail on which a piece is under way, or a message not acknowledged, and nothing has moved for so long, while
  // another rail of the endpoint answers, is dead.
  Duration stall = deadlines::kRailStall.of(deadlines::kSilence);
  Duration first_retry = deadlines::kFirstRailRetry.of(deadlines::kSilence);      // of a dead rail; doubles …
  Duration longest_retry = deadlines::kLongestRailRetry.of(deadlines::kSilence);  // … up to this
  // A rail that has not come up after so long is closed, and tried again: whoever greets there does not go on with it.
  Duration greeting = deadlines::kDataProof.of(deadlines::kSilence);
  // Ids and keys follow from it, so that a simulation can be repeated; none: nobody can guess them.
  std::optional<std::uint64_t> seed{};
};

// An address of this engine is the rails' addresses joined by '|'. listen() also takes one for all; where that names a
// port, rails for bulk listen on the ports behind it.
// The clock must outlive the engine. Errors: `invalid_argument` for no rails, or more than kMaxRails.
Result<std::unique_ptr<Engine>> make_engine(std::vector<std::unique_ptr<Engine>> rails, const Options& options,
                                            const Clock& clock);

}  // namespace rejoin::transport::striped
