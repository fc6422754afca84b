// The gradient log is the trainer's part of catching up. For each committed step it tells which ranges of which tensors
// are to be updated with which gradient. A contributor updates everything, once. A joiner updates the slices that it
// has; the log keeps the gradients of the slices that are on their way, within a budget, and brings each slice up to
// date step by step when it has arrived. The trainer's thread makes every call.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/ids.h"
#include "local/owner.h"

namespace rejoin::catchup {

// One call of the trainer's optimizer.
struct Update {
  std::uint32_t tensor = 0;
  std::uint64_t first = 0, count = 0;  // elements
  Step step;                           // whose gradient this is
  std::uint32_t contributors = 0;      // … the mean of so many replicas'
  BytesView gradient;                  // `count` elements; valid until the update ends
};

class GradientLog {
 public:
  // Returns the reduced gradient of these elements, for the step under way.
  using GradientOf = std::function<BytesView(std::uint32_t tensor, std::uint64_t first, std::uint64_t count)>;

  // Errors: of the device.
  static Result<std::unique_ptr<GradientLog>> make(local::Owner& owner, std::uint64_t budget_bytes);

  // Begins the update of `step`, to which so many have contributed: the state may be changed from here on. The updates
  // are to be applied in this order. Errors: of the device.
  Result<std::vector<Update>> begin(Step step, bool contributes, std::uint32_t contributors,
                                    const GradientOf& gradient_of);
  // Ends it: all of the updates have been applied. Calls no driver: what was kept for it goes when the next
  // begins.
  void end(Step step, bool contributes);

  // Of gradients that are held: kept ones, and those that the last update was given.
  std::uint64_t bytes() const { return bytes_ + used_bytes_; }

 private:
  struct Entry {
    Step step;
    std::uint32_t contributors = 0;
    device::Memory gradient;  // of the state's device
  };
  Result<> keep(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient);
  Result<> append(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient);
  GradientLog(local::Owner& owner, std::uint64_t budget_bytes) : owner_(owner), budget_(budget_bytes) {}
  void forget(std::uint32_t slice);

  local::Owner& owner_;
  const std::uint64_t budget_;
  std::map<std::uint32_t, std::vector<Entry>> entries_;                // by slice, steps in order
  std::uint64_t bytes_ = 0;                                            // of entries_
  std::unique_ptr<device::Stream> copies_;                             // of gradients to be kept
  std::vector<std::pair<std::uint32_t, local::SliceStatus>> applied_;  // slices of this update, as they were before
  std::vector<std::vector<Entry>> used_;                               // kept gradients, until the next update
  std::uint64_t used_bytes_ = 0;                                       // of those
  std::uint64_t lacked_ = 0;                                           // times that there was no memory for one
};

}  // namespace rejoin::catchup
