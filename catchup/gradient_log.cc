#include "catchup/gradient_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <new>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/log.h"

namespace rejoin::catchup {

using local::SliceState;
using local::SliceStatus;

namespace {

Result<device::Memory> of_heap(std::size_t size) {
  try {
    return device::on_heap(size);
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::exhausted, "{} of the host's memory for a gradient are not there", human_bytes(size));
  }
}

}  // namespace

void GradientLog::forget(std::uint32_t slice) {
  auto kept = entries_.extract(slice);
  if (kept.empty()) return;
  for (const auto& one : kept.mapped()) bytes_ -= one.gradient.bytes.size();
}

Result<std::unique_ptr<GradientLog>> GradientLog::make(local::Owner& owner, std::uint64_t budget_bytes) {
  auto stream = owner.device()->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  std::unique_ptr<GradientLog> gradient_log(new GradientLog(owner, budget_bytes));
  gradient_log->copies_ = std::move(*stream);
  return gradient_log;
}

Result<> GradientLog::append(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient) {
  auto& device = *owner_.device();
  auto memory = device.kind() == device::MemoryKind::host || gradient.empty() ? of_heap(gradient.size())
                                                                              : device.allocate(gradient.size());
  if (!memory) return tl::unexpected(memory.error());
  if (!gradient.empty())
    if (auto copied = copies_->copy(memory->bytes.data(), gradient.data(), gradient.size()); !copied) return copied;
  bytes_ += gradient.size();
  entries_[slice].push_back({step, contributors, std::move(*memory)});
  return {};
}

// Of a slice that is on its way. What there is no room for is left out: what arrives may be of a later step. Where it
// is not, that is a gap, and the slice is fetched again. The slice that has most goes on and loses its oldest; another
// one loses all, so that one of them gets as far as the budget goes. Errors: of the device.
Result<> GradientLog::keep(std::uint32_t slice, Step step, std::uint32_t contributors, BytesView gradient) {
  const auto over = [&] { return bytes() + gradient.size() > budget_; };
  if (over()) {
    std::uint64_t own = 0, most = 0;  // of the others
    for (const auto& [id, kept] : entries_) {
      std::uint64_t held = 0;
      for (const auto& one : kept) held += one.gradient.bytes.size();
      if (id == slice) own = held;
      else most = std::max(most, held);
    }
    if (most > 0 && own <= most) return forget(slice), Result<>();
  }
  for (auto own = entries_.find(slice); over() && own != entries_.end();) {
    bytes_ -= own->second.front().gradient.bytes.size();
    own->second.erase(own->second.begin());
    if (own->second.empty()) own = entries_.erase(own);
  }
  if (over()) return {};  // the last update's are in the way, until the next
  auto kept = append(slice, step, contributors, gradient);
  if (kept || kept.error().code != ErrorCode::exhausted) return kept;
  if (std::has_single_bit(++lacked_))
    spdlog::warn("this replica catches up more slowly: {}{}", kept.error().message,
                 lacked_ == 1 ? "" : fmt::format(" ({} times now)", lacked_));
  forget(slice);
  return {};
}

Result<std::vector<Update>> GradientLog::begin(Step step, bool contributes, std::uint32_t contributors,
                                               const GradientOf& gradient_of) {
  if (auto begun = owner_.begin_update(); !begun) return tl::unexpected(begun.error());
  const auto& slices = owner_.manifest().slices();
  auto* statuses = owner_.page().slice_statuses();
  std::vector<Update> updates;
  applied_.clear();
  used_.clear();
  used_bytes_ = 0;
  if (contributes) {
    used_.reserve(entries_.size());  // which end() fills
    const auto& tensors = owner_.manifest().tensors();
    for (std::uint32_t t = 0; t < tensors.size(); ++t)
      updates.push_back({t, 0, tensors[t].count, step, contributors, gradient_of(t, 0, tensors[t].count)});
    return updates;
  }
  for (std::uint32_t i = 0; i < slices.size(); ++i) {
    const local::Part& range = slices[i].range;
    const auto now = [&] { return gradient_of(range.tensor, range.first, range.count); };
    SliceStatus status = SliceStatus::unpack(statuses[i].load());
    switch (status.state) {
      case SliceState::absent:
      case SliceState::abandoned: forget(i); break;
      case SliceState::requested: {
        if (auto kept = keep(i, step, contributors, now()); !kept) return tl::unexpected(kept.error());
        break;
      }
      case SliceState::arrived: {
        auto kept = entries_.extract(i);
        std::uint64_t at = status.version();
        if (!kept.empty()) {
          for (auto& one : kept.mapped()) {
            bytes_ -= one.gradient.bytes.size();
            used_bytes_ += one.gradient.bytes.size();
            if (one.step.value != at + 1) continue;  // contained in what arrived
            updates.push_back({range.tensor, range.first, range.count, one.step, one.contributors, one.gradient.bytes});
            at = one.step.value;
          }
          used_.push_back(std::move(kept.mapped()));  // the buffers move along, the updates stay valid
        }
        if (at + 1 == step.value) {
          updates.push_back({range.tensor, range.first, range.count, step, contributors, now()});
          at = step.value;
        }
        // A gap can't be bridged: to be fetched again.
        applied_.push_back({i, status});
        if (at < step.value) {
          std::uint64_t expected = status.packed();
          statuses[i].compare_exchange_strong(expected, SliceStatus{SliceState::abandoned, 0}.packed());
          applied_.pop_back();
          std::erase_if(updates, [&](const Update& p) { return p.tensor == range.tensor && p.first == range.first; });
        }
        break;
      }
      case SliceState::current:
        if (status.version() + 1 == step.value)
          updates.push_back({range.tensor, range.first, range.count, step, contributors, now()});
        if (status.version() + 1 == step.value) applied_.push_back({i, status});
        break;
    }
  }
  if (auto kept = copies_->synchronize(); !kept) return tl::unexpected(kept.error());
  return updates;
}

void GradientLog::end(Step step, bool contributes) {
  auto* statuses = owner_.page().slice_statuses();
  if (contributes) {
    // Whoever contributes has everything; the statuses say so to a daemon that looks.
    for (std::uint32_t i = 0; i < owner_.manifest().slices().size(); ++i)
      statuses[i].store(SliceStatus{SliceState::current, step.value}.packed());
    for (auto& [slice, kept] : entries_) used_.push_back(std::move(kept));
    entries_.clear();
    used_bytes_ += std::exchange(bytes_, 0);
  } else {
    for (const auto& [slice, before] : applied_) {
      std::uint64_t expected = before.packed();  // the daemon may have asked for it again: then it stays so
      statuses[slice].compare_exchange_strong(
          expected, SliceStatus{SliceState::current, std::max(before.version(), step.value)}.packed());
    }
  }
  owner_.end_update(step.value);
}

}  // namespace rejoin::catchup
