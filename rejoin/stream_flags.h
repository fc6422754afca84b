// Flags by which CUDA streams and threads that call no driver wait for each other: one that a stream writes when it has
// come to an operation, one that it waits for until the operation has ended. They are in pinned memory that stays until
// the process ends, however late a stream looks at them, or gets to write one.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.h"

namespace rejoin {

// Any thread.
class StreamFlags {
 public:
  // Of an operation. Numbers of a pair only grow, so a stream that waits for an operation which has ended goes on,
  // whoever has the pair by then.
  struct Flags {
    struct Pair;
    Pair* pair = nullptr;
    std::uint64_t number = 0;

    Result<> queue_ready(device::Stream& stream) const;         // the stream has come to it
    Result<> queue_wait_for_end(device::Stream& stream) const;  // what is queued on it later waits for the end
    // No calls of the driver.
    bool ready() const;
    void end() const;
  };

  // Of all groups of this process on this device. Errors: `unavailable`: its streams wait for no flags.
  static Result<StreamFlags*> of(const std::shared_ptr<device::Device>& device);
  Result<Flags> take();  // may call the driver
  // After end(). It is taken again when the stream has come to it, too.
  void give_back(const Flags& flags);

 private:
  explicit StreamFlags(std::shared_ptr<device::Device> device);
  struct Inside;
  const std::unique_ptr<Inside> inside_;
};

}  // namespace rejoin
