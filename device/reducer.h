// Additions and copies in a GPU's memory, chunk by chunk, driven by the CPU: a kernel that runs for as long as there is
// something to come takes them from pinned memory (kernels/mailbox.h), so that a chunk costs no launch, nor any other
// call to the driver, which may stand still for as long as somebody's stream waits for a word of the CPU's.
//
// Threads: hold() and let_go() any; attend() one; all others one at a time, and another one than those.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>

#include "base/clock.h"
#include "base/types.h"
#include "device/device.h"
#include "device/kernels/mailbox.h"

namespace rejoin::device {

struct ReducerOptions {
  // What the trainer's kernels have to go without while gradients are exchanged. Two blocks of 512 are the least that
  // keep up with a NIC of 400 Gb/s.
  unsigned blocks = 8, threads = 512;
  // The kernel leaves when nothing has come for so long, and is launched again when something does: whatever becomes of
  // the other members, whoever waits for the whole device waits no longer than this.
  Duration patience = std::chrono::milliseconds(20);
  // The driver is called by make(), hold(), attend() and the destructor alone.
  bool attended = false;
};

class Reducer {
 public:
  // Errors: `invalid_argument` (a grid that can't be); `unavailable` (no kernels); of the device.
  static Result<std::unique_ptr<Reducer>> make(Device& device, const ReducerOptions& options);
  ~Reducer();  // waits for what is queued, held or not

  // out = a + b, as ftar::add() of the host (same bits, but for a NaN's payload), resp. out = in. In device memory, or
  // in pinned memory, and to be left alone until it is done, by other works as well: they run beside each other.
  // Pointers of an addition need the alignment of an element; multiples of 16 bytes, or the same distance to one, are
  // faster. Numbers count up from 1. Errors: of the device; nothing works on it any more.
  Result<std::uint64_t> add(DataType type, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count,
                            std::uint32_t divisor);
  Result<std::uint64_t> copy(std::byte* out, const std::byte* in, std::size_t size);
  // The last number up to which everything is done.
  Result<std::uint64_t> done();
  bool idle() const { return queued_ == done_; }
  // Nothing comes for a while: the kernel leaves when it has done what was given. Of one that is held: nothing.
  void rest();

  // From here on, until as many let_go() have come, the kernel stays on the device also with nothing to do, so that
  // nobody has to call the driver: a stream is about to wait for a word that the CPU writes when works are done. The
  // first of them launches; not before what is queued on `behind`, where given. Errors: of the device, and nothing is
  // held.
  Result<> hold(Stream* behind = nullptr);
  void let_go();  // the last one is a rest()

  // Of an attended one: a launch is wanted, resp. made, and whether the kernel is well is seen, for the other calls to
  // tell; nothing while it is held. Errors: of the device.
  bool wants_attention() const { return wanted_ && !held(); }
  Result<> attend();

  std::uint64_t launches() const { return launches_.load() - 1; }  // of the kernel, ever, but for make()'s
  Result<bool> resting();  // no kernel of this is on the device, or about to be; of one that is not held

 private:
  explicit Reducer(const ReducerOptions& options) : options_(options) {}
  Result<std::uint64_t> give(const kernels::Work& asked, std::uint64_t bytes);
  Result<> post_waiting();
  Result<> launch(Duration patience);  // with launching_ held
  Result<> see_to_it();
  bool held() const;
  bool is_served() const;
  void tell_to_leave(std::uint64_t launch);

  const ReducerOptions options_;
  Memory pinned_, device_;
  kernels::Mailbox* mailbox_ = nullptr;
  kernels::Relay* relay_ = nullptr;    // on the device
  std::deque<kernels::Work> waiting_;  // for room in the mailbox
  std::uint64_t queued_ = 0, posted_ = 0, done_ = 0, tiles_ = 0, looks_ = 0;

  std::atomic<std::uint64_t> launches_ = 0, holds_ = 0;
  std::atomic<bool> wanted_ = false, failed_ = false;
  std::mutex launching_;  // held over calls to the driver; never waited for by a thread that must not call it
  std::unique_ptr<Stream> kernel_;
  Result<> failure_;  // written before failed_ is
};

}  // namespace rejoin::device
