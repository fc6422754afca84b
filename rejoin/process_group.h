// Collective operations, and messages between two, of processes whose membership comes from elsewhere: what torch's
// process groups, a launcher or a scheduler know. For data-parallel replicas that come and go by themselves there is
// the session (session.h).
//
// A group starts without members. reconfigure() names them, on each of them; when one is lost everything that is under
// way fails on all of them with a sentence that names it, and reconfigure() with those that are left goes on: nothing
// of before arrives any more, and nothing is written into buffers of operations that have failed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/types.h"
#include "device/stream_handle.h"
#include "rejoin/listen_config.h"

#pragma GCC visibility push(default)
namespace rejoin {

using ProcessGroupConfig = ListenConfig;

// Buffers are in the host's memory or in the group's device's, alike on all members, and the caller's until the
// operation has ended. `inputs` are read and `outputs` written; four operations work in place, in their one input.
//
//   operation       inputs                        outputs
//   all_reduce      one, in place                 –
//   reduce          one; in place at the root     –
//   broadcast       one, in place                 –
//   all_gather      one                           one for each member, of any sizes that all give alike
//   reduce_scatter  one for each member           one
//   gather          one                           at the root one for each member
//   scatter         at the root one for each      one
//   all_to_all      one for each member, of any   one for each member, of the sizes that they send
//   barrier         –                             –
//   send, receive   one, in place                 –
struct CollectiveCall {
  Collective kind{};
  DataType type{};         // the elements' type, where they are combined
  Combine combine{};       // how they are
  std::uint32_t root = 0;  // the root's rank, where there is one; for send and receive the other member's
  // For send and receive: messages of one tag arrive in order. A new tag takes memory until reconfigure().
  std::uint32_t tag = 0;
  std::vector<std::span<std::byte>> inputs, outputs;
  Duration limit{};  // the operation fails when it takes longer, and the group with it
  // Buffers are in the memory of the group's device, and the operation begins when this CUDA stream has come
  // to what start() queues there. What is reduced is summed or averaged; other ways take the host's memory.
  bool on_device = false;
  CudaStream stream = nullptr;
};

// An operation under way. Thread: any.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool done() const = 0;
  // Waits until the operation has ended, and returns how. It asks `cancelled` about every 50 ms, which ends the wait
  // and not the operation. Errors: `timeout`: the operation has not ended within `limit`, and goes on; `cancelled`;
  // those of the operation.
  virtual Result<> wait(Duration limit, const std::function<bool()>& cancelled = {}) = 0;
  // Has ProcessGroup::next_done() return `number` once when it has ended.
  virtual void notify(std::uint64_t number) = 0;
  // For a device's memory: what is queued on this CUDA stream from now on waits until the operation has ended, well or
  // not; the caller waits for nothing. Errors: the operation's, if it has failed already; the device's.
  virtual Result<> wait_on(CudaStream stream) = 0;
};

// Thread: any. All operations run in a thread of the group's own, in the order of start(); all members start the same
// collective operations in the same order. Messages between two wait for nothing else.
class ProcessGroup {
 public:
  // Opens a group without a device. Errors: those of the transport and its address.
  static Result<std::unique_ptr<ProcessGroup>> open(const ProcessGroupConfig& config);
  // Opens a group with a device, by its name: "cuda:0" (device 0), "host". Operations on its memory go through the
  // host's only where the transport can't reach it. All members have such devices, or none. Closing the group waits for
  // the device, as cudaFree() does. Errors: also those of the device; `unavailable`: it has no kernels here.
  static Result<std::unique_ptr<ProcessGroup>> open(const ProcessGroupConfig& config, const std::string& device);
  virtual ~ProcessGroup() = default;  // what is under way fails

  // Returns the text that others give to reconfigure() for this member. Whoever has it may connect.
  virtual const std::string& handle() const = 0;
  // Names the members, by rank, with this one among them. All give the same list and the same number, which is a new
  // one each time, also after a call that has failed. What is under way fails with `cancelled`, on the others with
  // `unavailable`; where nothing is under way here, operations of others that do not need this member go on. Errors:
  // `timeout`, with those that did not come; `cancelled`; `invalid_argument`; `mismatch`: a member's transport is of
  // another family.
  virtual Result<> reconfigure(std::uint64_t number, const std::vector<std::string>& members, Duration limit,
                               const std::function<bool()>& cancelled = {}) = 0;
  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t size() const = 0;  // 0 before the first reconfigure()

  // Starts an operation. Errors: `invalid_argument`: buffers or a rank that can't be. The group's errors come with the
  // work. In a child of fork() this, reconfigure() and waits fail at once, with `unavailable`.
  virtual Result<std::shared_ptr<Work>> start(const CollectiveCall& call) = 0;
  // Waits for an operation with notify() to end, and returns its number. Errors: `timeout`; `cancelled`: shut down, and
  // there are no more.
  virtual Result<std::uint64_t> next_done(Duration limit) = 0;
  // Has everything under way fail on all members, for this reason.
  virtual void abort(const std::string& reason) = 0;
  // Leaves the group: waits, at most so long, until the others know it. They may go on with what they have of this
  // member.
  virtual void shutdown(Duration limit) = 0;
  // Whether a member has given up what there was since the last reconfigure(), as far as this one has heard: what it
  // starts fails until the next one, also where all that it had started before has ended well.
  virtual bool failed() const = 0;
};

}  // namespace rejoin

#pragma GCC visibility pop
