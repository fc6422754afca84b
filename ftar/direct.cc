// The latency-optimal all-reduce for small buckets: every contributor sends its input to every member in one message,
// and everyone adds all inputs in the same order.
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

void DirectOperation::start() {
  if (owner_.position_ < owner_.contributors_)
    for (auto* peer : owner_.ring_peers_)
      if (peer != nullptr)
        if (!owner_.send(*peer, MessageHeader::direct, bucket_.index, bucket_.step.value, bucket_.spec.input))
          return;  // its `closed` event ends this operation
  on_direct();
}

void DirectOperation::on_direct() {
  const std::uint32_t n = owner_.contributors_;
  for (std::uint32_t i = 0; i < n; ++i)
    if (owner_.direct_input(bucket_.index, bucket_.step, i).empty()) return;
  auto* out = bucket_.spec.output.data();
  const auto input = [&](std::uint32_t i) { return owner_.direct_input(bucket_.index, bucket_.step, i).data(); };
  if (n == 1) {
    std::memcpy(out, input(0), bucket_.bytes());
  } else {
    for (std::uint32_t i = 1; i < n; ++i)
      add(bucket_.spec.type, out, i == 1 ? input(0) : out, input(i), bucket_.spec.count,
          i == n - 1 && bucket_.op == ReduceOp::mean ? n : 0);
  }
  done_ = true;
}

std::optional<Wait> DirectOperation::wait() const {
  for (std::uint32_t i = 0; i < owner_.contributors_; ++i)
    if (owner_.direct_input(bucket_.index, bucket_.step, i).empty())
      return Wait{.on = owner_.ring_[i].member, .what = fmt::format("its part of bucket {}", bucket_.index)};
  return std::nullopt;
}

}  // namespace rejoin::ftar
