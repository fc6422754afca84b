// Additions, copies and coding in a GPU's memory, chunk by chunk, driven by the CPU: a kernel that runs for as long as
// there is something to come takes them from pinned memory (kernels/mailbox.h), so that a chunk costs no launch, and no
// call of the driver.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/types.h"
#include "device/device.h"
#include "device/kernels/mailbox.h"

namespace rejoin::device {

struct ReducerOptions {
  // The kernel takes this much from the trainer's kernels while gradients are reduced: each block of 512 threads has a
  // multiprocessor to itself. Two are the least that keep up with a NIC of 400 Gb/s. With an external launcher, where
  // the kernel stays beside the trainer's, they are at most half of the device's; 0: 8, or a quarter of the device's.
  unsigned blocks = 8, threads = 512;
  // The kernel leaves when nothing has come for so long, and is launched again when something does: whatever becomes of
  // the other members, whoever waits for the whole device waits no longer than this.
  Duration patience = std::chrono::milliseconds(20);
  // Passes can be given, too: by another kernel, so that who gives none has the one that is best at additions.
  bool codes = false;
  // Only hold() and launch_if_wanted() call the driver; else whoever gives work launches the kernel for it.
  bool external_launcher = false;
};

class Reducer {
 public:
  // Launches the kernel once, so that it is loaded. Errors: `invalid_argument` (a grid that can't be); `unavailable`
  // (no kernels, or with an external launcher: none that runs while the CPU goes on); of the device.
  static Result<std::unique_ptr<Reducer>> make(Device& device, const ReducerOptions& options);
  ~Reducer();  // waits for what the kernel has begun

  // ---- one thread, which gives the works
  // out = a + b, as ftar::add() of the host (same bits), in device memory; resp. out = in, in
  // device memory or pinned memory. To be left alone until it is done, by other works as well: they run beside each
  // other. Pointers need the alignment of an element; multiples of 16 bytes, or the same distance to one, are faster.
  // Numbers count up from 1. Errors: of the device; nothing works on it any more.
  Result<std::uint64_t> add(DataType type, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count,
                            std::uint32_t divisor);
  Result<std::uint64_t> copy(std::byte* out, const std::byte* in, std::size_t size);
  // The pass, with the bits of the CPU's. What coding loses is added to `loss` (none: it is not wanted) before done()
  // tells. Only where ReducerOptions::codes says so.
  Result<std::uint64_t> code(const coding::Pass& pass, std::shared_ptr<coding::Loss> loss);
  // Returns the last number up to which all works are done.
  Result<std::uint64_t> done();
  bool idle() const { return given_ == done_; }
  // Nothing comes for a while: the kernel leaves when it has done what was given, unless it is held.
  void rest();
  bool wants_launch();  // no kernel takes what was given, nor is held; whoever launches is called
  void call_launcher_by(std::function<void()> call) { call_launcher_ = std::move(call); }  // while nothing is given

  // ---- any thread
  // From here until as many let_go() the kernel stays, work or not, and nobody else calls the driver for it. The first
  // launches it, behind what is queued on the stream. Errors: of the device.
  Result<> hold(Stream* behind = nullptr);
  void let_go();  // calls no driver, and waits for nobody who does
  // Launches the kernel if it is wanted and not held, and sees whether it has died; the others tell from then on.
  Result<> launch_if_wanted();

  bool codes() const { return options_.codes; }
  unsigned blocks() const { return options_.blocks; }
  std::uint64_t launches() const { return launches_; }  // of the kernel, ever

 private:
  friend struct ReducerPeer;
  explicit Reducer(const ReducerOptions& options) : options_(options) {}
  struct Given {
    kernels::Work work;
    coding::Pass pass{};
    std::shared_ptr<coding::Loss> loss;
  };
  Result<std::uint64_t> give(Given&& given, std::uint64_t bytes);
  Result<> post_waiting();
  bool a_kernel_takes_it() const;
  Result<> load();
  Result<> launch(Duration patience);
  Result<> look();
  Result<> failure() const;
  void leave(std::uint64_t launch);
  void see_done();

  const ReducerOptions options_;
  Memory pinned_, on_device_;
  kernels::Mailbox* mailbox_ = nullptr;
  kernels::Relay* relay_ = nullptr;  // on the device

  // The giving thread's.
  std::deque<Given> waiting_;                                                   // for room in the mailbox
  std::array<std::shared_ptr<coding::Loss>, kernels::Mailbox::kWorks> losses_;  // where those of what was posted go
  std::uint64_t given_ = 0, posted_ = 0, done_ = 0, tiles_ = 0, looks_ = 0;
  std::function<void()> call_launcher_;
  std::atomic<bool> wanted_{false};  // … and the launcher's

  // Launching. A thread that holds launching_ may be in the driver: whoever may not wait for that takes it never.
  std::mutex launching_;
  std::unique_ptr<Stream> kernel_;
  std::atomic<std::uint64_t> holds_{0}, launches_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex error_mutex_;  // guards
  std::optional<Error> error_;
};

}  // namespace rejoin::device
