// The trainer's part of catching up: for each committed step, which ranges of which tensors are to be updated with
// which gradient. For a contributor that is everything, once. For a joiner it is what it has; what is on its way has
// its gradients kept until it has arrived (within a budget), and is then brought up to date step by step.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/ids.h"
#include "shm/owner.h"

namespace rejoin::catchup {

// One call of the trainer's optimizer.
struct Piece {
  std::uint32_t tensor = 0;
  std::uint64_t first = 0, count = 0;  // elements
  Step step;                           // whose gradient this is
  std::uint32_t contributors = 0;      // … the mean of so many replicas'
  BytesView gradient;                  // `count` elements; valid until the update ends
};

class Keeper {
 public:
  // Where the reduced gradient of these elements is, for the step under way.
  using GradientOf = std::function<BytesView(std::uint32_t tensor, std::uint64_t first, std::uint64_t count)>;

  // Errors: of the device.
  static Result<std::unique_ptr<Keeper>> make(shm::Owner& owner, std::uint64_t budget_bytes);

  // Begins the update of `step`, to which so many have contributed: the state may be changed from here on. The pieces
  // are to be applied in this order. Errors: of the device.
  Result<std::vector<Piece>> begin(Step step, bool contributes, std::uint32_t contributors,
                                   const GradientOf& gradient_of);
  // Ends it: everything in the pieces has been applied. Calls no driver: what was kept for it goes when the next
  // begins.
  void end(Step step, bool contributes);

  std::uint64_t kept_bytes() const { return kept_bytes_; }

 private:
  struct Kept {
    Step step;
    std::uint32_t contributors = 0;
    device::Memory gradient;  // of the state's device
  };
  Result<> keep(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient);
  Keeper(shm::Owner& owner, std::uint64_t budget_bytes) : owner_(owner), budget_(budget_bytes) {}
  void forget(std::uint32_t slice);

  shm::Owner& owner_;
  const std::uint64_t budget_;
  std::map<std::uint32_t, std::vector<Kept>> kept_;  // by slice, steps in order
  std::uint64_t kept_bytes_ = 0;
  std::unique_ptr<device::Stream> copies_;                         // of gradients to be kept
  std::vector<std::pair<std::uint32_t, shm::SliceWord>> applied_;  // slices of this update, with the word they had
  std::vector<std::vector<Kept>> used_;                            // kept gradients, until the next update
};

}  // namespace rejoin::catchup
