#include "catchup/keeper.h"

#include <algorithm>

namespace rejoin::catchup {

using shm::SliceState;
using shm::SliceWord;

void Keeper::forget(std::uint32_t slice) {
  auto kept = kept_.extract(slice);
  if (kept.empty()) return;
  for (const auto& one : kept.mapped()) kept_bytes_ -= one.gradient.size();
}

std::vector<Piece> Keeper::begin(Step step, bool contributes, const GradientOf& gradient_of) {
  owner_.begin_update();
  const auto& slices = owner_.manifest().slices();
  auto* words = owner_.page().slice_words();
  std::vector<Piece> pieces;
  applied_.clear();
  used_.clear();
  if (contributes) {
    const auto& tensors = owner_.manifest().tensors();
    for (std::uint32_t t = 0; t < tensors.size(); ++t)
      pieces.push_back({t, 0, tensors[t].count, step, gradient_of(t, 0, tensors[t].count)});
    return pieces;
  }
  for (std::uint32_t i = 0; i < slices.size(); ++i) {
    const shm::Part& range = slices[i].whole;
    const auto now = [&] { return gradient_of(range.tensor, range.first, range.count); };
    SliceWord word = SliceWord::unpack(words[i].load());
    switch (word.state) {
      case SliceState::absent:
      case SliceState::abandoned: forget(i); break;
      case SliceState::requested: {
        const BytesView gradient = now();
        if (kept_bytes_ + gradient.size() > budget_) {
          std::uint64_t expected = word.packed();
          words[i].compare_exchange_strong(expected, SliceWord{SliceState::abandoned, 0}.packed());
          forget(i);
          break;
        }
        kept_bytes_ += gradient.size();
        kept_[i].push_back({step, Bytes(gradient.begin(), gradient.end())});
        break;
      }
      case SliceState::arrived: {
        auto kept = kept_.extract(i);
        std::uint64_t at = word.version;
        if (!kept.empty()) {
          for (auto& one : kept.mapped()) {
            kept_bytes_ -= one.gradient.size();
            if (one.step.value != at + 1) continue;  // contained in what arrived
            pieces.push_back({range.tensor, range.first, range.count, one.step, one.gradient});
            at = one.step.value;
          }
          used_.push_back(std::move(kept.mapped()));  // the buffers move along, the pieces stay valid
        }
        if (at + 1 == step.value) {
          pieces.push_back({range.tensor, range.first, range.count, step, now()});
          at = step.value;
        }
        // A gap can't be bridged: to be fetched again.
        applied_.push_back({i, word});
        if (at < step.value) {
          std::uint64_t expected = word.packed();
          words[i].compare_exchange_strong(expected, SliceWord{SliceState::abandoned, 0}.packed());
          applied_.pop_back();
          std::erase_if(pieces, [&](const Piece& p) { return p.tensor == range.tensor && p.first == range.first; });
        }
        break;
      }
      case SliceState::current:
        if (word.version + 1 == step.value) pieces.push_back({range.tensor, range.first, range.count, step, now()});
        if (word.version + 1 == step.value) applied_.push_back({i, word});
        break;
    }
  }
  owner_.page().kept_gradient_bytes.store(kept_bytes_, std::memory_order_relaxed);
  return pieces;
}

void Keeper::end(Step step, bool contributes) {
  auto* words = owner_.page().slice_words();
  if (contributes) {
    // Whoever contributes has everything; the words say so to a daemon that looks.
    for (std::uint32_t i = 0; i < owner_.manifest().slices().size(); ++i)
      words[i].store(SliceWord{SliceState::current, step.value}.packed());
    kept_.clear();
    kept_bytes_ = 0;
  } else {
    for (const auto& [slice, before] : applied_) {
      std::uint64_t expected = before.packed();  // the daemon may have asked for it again: then it stays so
      words[slice].compare_exchange_strong(
          expected, SliceWord{SliceState::current, std::max(before.version, step.value)}.packed());
    }
  }
  used_.clear();
  owner_.end_update(step.value);
}

}  // namespace rejoin::catchup
