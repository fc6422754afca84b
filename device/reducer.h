// Additions in a GPU's memory, chunk by chunk, driven by the CPU: a kernel that runs for as long as there is something
// to come takes them from pinned memory (kernels/mailbox.h), so that a chunk costs no launch. Pure copies go by a copy
// engine and take nothing from the GPU's cores. Thread: one at a time.
#pragma once

#include <deque>

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
};

class Reducer {
 public:
  // Errors: `invalid_argument` (a grid that can't be); `unavailable` (no kernels); of the device.
  static Result<std::unique_ptr<Reducer>> make(Device& device, const ReducerOptions& options);
  ~Reducer();  // waits for what is queued

  // out = a + b, as ftar::add() of the host (same bits, but for a NaN's payload), resp. out = in. All in device memory,
  // and to be left alone until it is done, by other works as well: they run beside each other. Pointers need the
  // alignment of an element; multiples of 16 bytes, or the same distance to one, are faster. Numbers count up from 1.
  // Errors: of the device; nothing works on it any more.
  Result<std::uint64_t> add(DataType type, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count,
                            std::uint32_t divisor);
  Result<std::uint64_t> copy(std::byte* out, const std::byte* in, std::size_t size);
  // The last number up to which everything is done.
  Result<std::uint64_t> done();
  bool idle() const { return queued_ == done_; }
  std::uint64_t launches() const { return launches_; }  // of the kernel, ever
  Result<bool> resting();                               // no kernel of this is on the device, or about to be
  // Nothing comes for a while: the kernel leaves when it has done what was given.
  void rest();

 private:
  struct Queued {
    std::uint64_t number = 0;
    std::uint64_t work = 0, mark = 0;  // of the kernel, of the copies; one of the two
  };
  explicit Reducer(const ReducerOptions& options) : options_(options) {}
  Result<> post_waiting();
  Result<> launch();
  std::uint64_t works_done() const;
  bool a_block_left() const;

  const ReducerOptions options_;
  Memory pinned_;
  kernels::Mailbox* mailbox_ = nullptr;
  std::unique_ptr<Stream> kernel_, copies_;
  std::deque<kernels::Work> waiting_;  // for room in the mailbox
  std::deque<Queued> under_way_;
  std::uint64_t works_ = 0, posted_ = 0, launches_ = 0, launch_mark_ = 0, looks_ = 0;
  bool running_ = false;  // a launch that has not been told to leave
  std::uint64_t queued_ = 0, done_ = 0;
};

}  // namespace rejoin::device
