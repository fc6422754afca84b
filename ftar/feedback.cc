#include "ftar/feedback.h"

#include <cmath>

#include "base/fail.h"

namespace rejoin::ftar {

Result<Feedback> Feedback::make(Coder& coder, std::size_t bytes) {
  Feedback made;
  for (auto& kept : made.kept_) {
    auto memory = coder.allocate(bytes);
    if (!memory) return tl::unexpected(memory.error());
    kept.memory = std::move(*memory);
  }
  return made;
}

void Feedback::begin(Step step, std::uint32_t divisor) {
  if (step_ && step != *step_) {
    // Of a step that this member has not ended, or that was rolled back, nobody knows what has been lost.
    if (step < *step_ || !whole_) forget();
    else now_ = 1 - now_;
  }
  step_ = step;
  whole_ = false;
  next().any = false;
  next().divisor = divisor > 1 ? divisor : 1;
  next().factor = 1;
  times_ = kept_[now_].factor * (static_cast<float>(next().divisor) / static_cast<float>(kept_[now_].divisor));
}

void Feedback::scale(Step step, float factor) {
  REJOIN_CHECK(std::isfinite(factor) && factor >= 0, "what step {} has lost is to count {} times", step.value, factor);
  if (step_ == step && whole_) next().factor = factor;
}

void Feedback::forget() {
  for (auto& kept : kept_) kept.any = false, kept.factor = 1;
  step_.reset();
}

std::byte* Feedback::after(const Range& range) {
  next().any = next().touched = true;
  return next().memory.bytes.data() + range.offset;
}

std::byte* Feedback::after_nothing(const Range& range) {
  return next().touched ? next().memory.bytes.data() + range.offset : nullptr;
}

std::size_t Feedback::bytes() const {
  std::size_t all = 0;
  for (const auto& kept : kept_) all += kept.touched ? kept.memory.bytes.size() : 0;
  return all;
}

}  // namespace rejoin::ftar
