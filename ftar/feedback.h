// What coding has lost of a bucket's elements here, kept to be added to what is coded of them in the next step: so that
// nothing is lost for good, however often it is rounded. It is this member's own, and no part of the replicated state:
// whatever it is, all members decode the same bytes.
//
// Two copies: what the last committed step has left, which a retry of the step under way starts again from, and what
// this step leaves. That a step has been committed is known when a later one begins.
//
// What a step has lost counts as much as its mean has counted in the update: times a factor that the trainer tells, 1
// where it tells none. See "Clipping" under "Coded gradients" in docs/design-notes.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/ids.h"
#include "ftar/coder.h"
#include "ftar/schedule.h"

namespace rejoin::ftar {

class Feedback {
 public:
  // Memory of this size twice, of the coder's. Errors: of the system, or the device.
  static Result<Feedback> make(Coder& coder, std::size_t bytes);

  // An all-reduce begins, perhaps again. `divisor`: of its mean; what is kept is of sums, so that it counts as much
  // where the next step's divisor is another one.
  void begin(Step step, std::uint32_t divisor);
  void on_done() { whole_ = true; }
  // What this step has lost counts times `factor` in the next one, however often that begins; 0: not at all. Of any
  // step but the one that has been done here last, and before a later one begins, it changes nothing. The last one told
  // holds. `factor` is finite, and not below 0.
  void scale(Step step, float factor);
  void forget();  // as if nothing had been coded yet

  // Of a range: what is to be added, times so much; none: nothing.
  const std::byte* before(const Range& range) const {
    return kept_[now_].any && times_ > 0 ? kept_[now_].memory.bytes.data() + range.offset : nullptr;
  }
  float times() const { return times_; }
  // … and where to put what is lost now; or zeros, since nothing is (none: they are there). Of each byte it is asked
  // once in each all-reduce.
  std::byte* after(const Range& range);
  std::byte* after_nothing(const Range& range);

  std::size_t bytes() const;  // that are in use

 private:
  struct Kept {
    device::Memory memory;
    bool any = false;      // of it is not zero, perhaps
    bool touched = false;  // … was
    std::uint32_t divisor = 1;
    float factor = 1;
  };
  Kept& next() { return kept_[1 - now_]; }

  std::array<Kept, 2> kept_;
  std::size_t now_ = 0;
  std::optional<Step> step_;  // that the other one is of
  bool whole_ = false;        // … and all of it
  float times_ = 1;
};

}  // namespace rejoin::ftar
