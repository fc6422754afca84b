// The latency-optimal all-reduce for small buckets: every contributor sends its input to every member in one message,
// and everyone adds all inputs in the same order. The CPU does, also where buckets are in a GPU's memory: two small
// copies cost less than a ring's hops.
#include <fmt/format.h>

#include "base/digest.h"
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

void DirectOperation::start() {
  own_here_ = !owner_.reducer_ || !contributes();
  if (own_here_) {
    send_own();
    return on_direct();
  }
  auto copied = owner_.reducer_->copy(bucket_.own.data(), bucket_.spec.input.data(), bucket_.bytes());
  if (owner_.reduced_on_device(copied)) fetching_ = *copied;
}

void DirectOperation::send_own() {
  if (!contributes()) return;
  const BytesView own = input(owner_.position_);
  for (auto* peer : owner_.ring_peers_)
    if (peer != nullptr)
      if (!owner_.send(*peer, MessageHeader::direct, bucket_.index, bucket_.step.value, own))
        return;  // its `closed` event ends this operation
}

void DirectOperation::on_reduced(std::uint64_t number) {
  if (fetching_ && number >= *fetching_) {
    fetching_.reset();
    own_here_ = true;
    send_own();
    on_direct();
  }
  if (storing_ && number >= *storing_) done_ = true;
}

BytesView DirectOperation::input(std::uint32_t contributor) const {
  if (contributor == owner_.position_)
    return !own_here_ ? BytesView{} : owner_.reducer_ ? BytesView(bucket_.own) : BytesView(bucket_.spec.input);
  return owner_.direct_input(bucket_.index, bucket_.step, contributor);
}

void DirectOperation::on_direct() {
  const std::uint32_t n = owner_.contributors_;
  if (storing_ || done_) return;
  for (std::uint32_t i = 0; i < n; ++i)
    if (input(i).empty()) return;
  auto* out = owner_.reducer_ ? bucket_.result.data() : bucket_.spec.output.data();
  if (n == 1) {
    std::memcpy(out, input(0).data(), bucket_.bytes());
  } else {
    for (std::uint32_t i = 1; i < n; ++i)
      add(bucket_.spec.type, out, i == 1 ? input(0).data() : out, input(i).data(), bucket_.spec.count,
          i == n - 1 && bucket_.op == ReduceOp::mean ? n : 0);
  }
  if (!owner_.reducer_) {
    if (owner_.digesting_) digest_ = combine_digests(0, rejoin::digest(bucket_.spec.output));
    done_ = true;
    return;
  }
  auto copied = owner_.reducer_->copy(bucket_.spec.output.data(), out, bucket_.bytes());
  if (owner_.reduced_on_device(copied)) storing_ = *copied;
}

std::optional<Wait> DirectOperation::wait() const {
  if (fetching_ || storing_) return Wait{.what = "its GPU's copies"};
  for (std::uint32_t i = 0; i < owner_.contributors_; ++i)
    if (input(i).empty())
      return Wait{.on = owner_.ring_[i].member, .what = fmt::format("its part of bucket {}", bucket_.index)};
  return std::nullopt;
}

}  // namespace rejoin::ftar
