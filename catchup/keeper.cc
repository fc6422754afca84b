#include "catchup/keeper.h"

#include <algorithm>

namespace rejoin::catchup {

using shm::SliceState;
using shm::SliceWord;

void Keeper::forget(std::uint32_t slice) {
  auto kept = kept_.extract(slice);
  if (kept.empty()) return;
  for (const auto& one : kept.mapped()) kept_bytes_ -= one.gradient.bytes.size();
}

Result<std::unique_ptr<Keeper>> Keeper::make(shm::Owner& owner, std::uint64_t budget_bytes) {
  auto stream = owner.device()->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  std::unique_ptr<Keeper> keeper(new Keeper(owner, budget_bytes));
  keeper->copies_ = std::move(*stream);
  return keeper;
}

Result<> Keeper::keep(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient) {
  auto& device = *owner_.device();
  auto memory = device.kind() == device::MemoryKind::host || gradient.empty()
                    ? Result<device::Memory>(device::on_heap(gradient.size()))
                    : device.allocate(gradient.size());
  if (!memory) return tl::unexpected(memory.error());
  if (!gradient.empty())
    if (auto copied = copies_->copy(memory->bytes.data(), gradient.data(), gradient.size()); !copied) return copied;
  kept_bytes_ += gradient.size();
  kept_[slice].push_back({step, contributors, std::move(*memory)});
  return {};
}

Result<std::vector<Piece>> Keeper::begin(Step step, bool contributes, std::uint32_t contributors,
                                         const GradientOf& gradient_of) {
  if (auto begun = owner_.begin_update(); !begun) return tl::unexpected(begun.error());
  const auto& slices = owner_.manifest().slices();
  auto* words = owner_.page().slice_words();
  std::vector<Piece> pieces;
  applied_.clear();
  used_.clear();
  if (contributes) {
    const auto& tensors = owner_.manifest().tensors();
    for (std::uint32_t t = 0; t < tensors.size(); ++t)
      pieces.push_back({t, 0, tensors[t].count, step, contributors, gradient_of(t, 0, tensors[t].count)});
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
        if (auto kept = keep(i, step, contributors, gradient); !kept) return tl::unexpected(kept.error());
        break;
      }
      case SliceState::arrived: {
        auto kept = kept_.extract(i);
        std::uint64_t at = word.version;
        if (!kept.empty()) {
          for (auto& one : kept.mapped()) {
            kept_bytes_ -= one.gradient.bytes.size();
            if (one.step.value != at + 1) continue;  // contained in what arrived
            pieces.push_back({range.tensor, range.first, range.count, one.step, one.contributors, one.gradient.bytes});
            at = one.step.value;
          }
          used_.push_back(std::move(kept.mapped()));  // the buffers move along, the pieces stay valid
        }
        if (at + 1 == step.value) {
          pieces.push_back({range.tensor, range.first, range.count, step, contributors, now()});
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
        if (word.version + 1 == step.value)
          pieces.push_back({range.tensor, range.first, range.count, step, contributors, now()});
        if (word.version + 1 == step.value) applied_.push_back({i, word});
        break;
    }
  }
  owner_.page().kept_gradient_bytes.store(kept_bytes_, std::memory_order_relaxed);
  if (auto kept = copies_->synchronize(); !kept) return tl::unexpected(kept.error());
  return pieces;
}

void Keeper::end(Step step, bool contributes) {
  auto* words = owner_.page().slice_words();
  if (contributes) {
    // Whoever contributes has everything; the words say so to a daemon that looks.
    for (std::uint32_t i = 0; i < owner_.manifest().slices().size(); ++i)
      words[i].store(SliceWord{SliceState::current, step.value}.packed());
    for (auto& [slice, kept] : kept_) used_.push_back(std::move(kept));
    kept_.clear();
    kept_bytes_ = 0;
  } else {
    for (const auto& [slice, before] : applied_) {
      std::uint64_t expected = before.packed();  // the daemon may have asked for it again: then it stays so
      words[slice].compare_exchange_strong(
          expected, SliceWord{SliceState::current, std::max(before.version, step.value)}.packed());
    }
  }
  owner_.end_update(step.value);
}

}  // namespace rejoin::catchup
