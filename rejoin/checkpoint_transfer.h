// One process gives others a state as of one step, without a coordinator: for frameworks that have a membership of
// their own and want this transport under it (python/src/rejoin/torchft.py).
//
// The messages, in order (checkpoint.proto):
//   1. Who fetches connects; its hello shows that it knows the secret of the server's address.
//   2. It sends CheckpointRequest with the step that it wants.
//   3. The server answers with CheckpointOffer when that step is published, or at once where a later one is.
//   4. Who fetches reads the contents' list and then the buffers out of the server's memory, and compares digests, of
//      the list also a proof by that secret. The server's trainer has no part in it.
//   5. When it has all of it, it sends CheckpointRequest once more, with `done`, and the server closes the
//      connection.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/result.h"
#include "rejoin/listen_config.h"

#pragma GCC visibility push(default)
namespace rejoin {

using CheckpointServerConfig = ListenConfig;

// Thread: any one at a time. The server has a thread of its own, which serves. In a child of fork(), where that is not,
// publish() is `unavailable`, withdraw() does nothing, and the parent's server goes on.
class CheckpointServer {
 public:
  // Opens a server. Errors: those of the transport and its address.
  static Result<std::unique_ptr<CheckpointServer>> open(const CheckpointServerConfig& config);
  virtual ~CheckpointServer() = default;  // withdraws what is published

  // Returns the text that CheckpointFetch::open() takes; the caller passes it on by whatever the processes know of each
  // other by. It lets anyone in who has it.
  virtual const std::string& address() const = 0;

  // Offers this state instead of what was offered before. The bytes are the caller's, in the host's memory, and
  // must stay as they are until withdraw() has returned; `description` is copied. It reads all bytes once, for their
  // digests. Errors: those of the transport, where it can't register the memory; nothing is offered then.
  virtual Result<> publish(std::uint64_t step, std::string description,
                           const std::vector<std::span<const std::byte>>& buffers) = 0;

  // Waits, at most `patience`, for the fetches that the state has been offered to. When it returns, nobody reads these
  // bytes any more, and fetches that are still under way fail. Returns how many those are. `cancelled` is asked about
  // every 50 ms meanwhile, and ends the wait. So does what it throws, which passes through when the bytes are
  // withdrawn.
  virtual std::size_t withdraw(Duration patience = {}, const std::function<bool()>& cancelled = {}) = 0;
};

// Thread: the one that has opened it.
class CheckpointFetch {
 public:
  // Waits until `step` is published there, at most so long. `cancelled` is asked about every 50 ms while anything
  // waits, and ends it; what it throws passes through, and the fetch is over. `transport` is this process's, of the
  // server's family. Errors: `timeout`, with what was waited for; `refused`: a later step is published; `mismatch`: the
  // server's transport is of another family; `unavailable`: the server is not there, or not any more; `corrupt`;
  // `cancelled`; `invalid_argument`: that is no address.
  static Result<std::unique_ptr<CheckpointFetch>> open(const std::string& transport, const std::string& address,
                                                       std::uint64_t step, Duration limit,
                                                       std::function<bool()> cancelled = {});
  virtual ~CheckpointFetch() = default;

  virtual const std::string& description() const = 0;
  virtual const std::vector<std::uint64_t>& sizes() const = 0;  // bytes of each buffer

  // Fills these buffers, which have the sizes of sizes(). It is called once; then the fetch is over. The content of the
  // buffers is undefined where it fails. Errors: `timeout`; `unavailable`: withdrawn meanwhile, or the server has gone;
  // `corrupt`: a digest differs; `cancelled`; `invalid_argument`: other sizes.
  virtual Result<> into(const std::vector<std::span<std::byte>>& buffers, Duration limit) = 0;
};

}  // namespace rejoin

#pragma GCC visibility pop
