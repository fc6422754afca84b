// The latency-optimal all-reduce for small buckets: every contributor sends its input to every member in messages, and
// everyone adds all inputs in the same order. The CPU does, also where buckets are in a GPU's memory: two small copies
// cost less than a ring's hops.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/digest.h"
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

// ---- room

// Which buckets may go directly: as many as there is memory for in a ring of the most members, so that all members
// choose the same ones.
void Communicator::choose_direct() {
  const std::size_t most = reducer_ ? options_.device_direct_bytes : options_.direct_bytes;
  std::vector<std::size_t> order(buckets_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return buckets_[a].bytes() < buckets_[b].bytes(); });
  const std::size_t copies = 2 * std::size_t{options_.direct_members} + 2;  // two inboxes; of a device pinned room
  std::size_t left = options_.direct_memory;
  for (const std::size_t index : order) {
    const std::size_t bytes = round_up(buckets_[index].bytes(), 64);
    if (buckets_[index].bytes() > most || bytes > left / copies) return;
    left -= bytes * copies;
    buckets_[index].small = true;
  }
}

// Pinned room for small buckets of a device.
Result<> Communicator::reserve_direct() {
  if (!reducer_) return {};
  std::size_t total = 0;
  for (const auto& bucket : buckets_)
    if (bucket.small) total += 2 * round_up(bucket.bytes(), 64);
  if (total == 0) return {};
  auto pinned = options_.device->allocate_pinned(total);
  if (!pinned) return tl::unexpected(pinned.error());
  direct_room_ = std::move(*pinned);
  auto rest = direct_room_.bytes;
  for (auto& bucket : buckets_)
    if (bucket.small)
      for (auto* room : {&bucket.own, &bucket.result}) {
        *room = rest.first(bucket.bytes());
        rest = rest.subspan(round_up(bucket.bytes(), 64));
      }
  return {};
}

bool Communicator::direct(const Bucket& bucket) const {
  return bucket.small && ring_.size() <= options_.direct_members;
}

// ---- what comes in

bool Communicator::on_direct_part(Peer& peer, Bucket& bucket, Step step, BytesView message) {
  const auto from = std::find(ring_peers_.begin(), ring_peers_.end(), &peer);
  const auto place = static_cast<std::size_t>(from - ring_peers_.begin());
  auto& inbox = bucket.inbox[step.value % 2];
  DirectPart part{};
  if (place >= contributors_ || inbox.data.empty() || !take(message, part) || message.empty()) return false;
  const std::size_t arrived = inbox.step == step ? inbox.arrived[place] : 0;
  if (part.offset != arrived || message.size() > bucket.bytes() - arrived) return false;
  if (inbox.step != step) {
    inbox.step = step;
    inbox.arrived.assign(contributors_, 0);
  }
  const auto room = std::span(inbox.data).subspan(place * bucket.bytes(), bucket.bytes());
  std::memcpy(room.data() + arrived, message.data(), message.size());
  inbox.arrived[place] += message.size();
  last_progress_ = now_;
  if (inbox.arrived[place] < bucket.bytes()) return true;
  damage_if_due(step, room);
  if (bucket.running) bucket.running->on_direct();
  return true;
}

BytesView Communicator::direct_input(std::uint32_t index, Step step, std::uint32_t contributor) const {
  const Bucket& bucket = buckets_[index];
  const auto& inbox = bucket.inbox[step.value % 2];
  if (inbox.step != step || inbox.arrived[contributor] < bucket.bytes()) return {};
  return BytesView(inbox.data).subspan(contributor * bucket.bytes(), bucket.bytes());
}

// ---- the operation

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
  Bytes body;
  for (std::size_t at = 0; at < own.size(); at += DirectPart::kMost) {
    const BytesView bytes = own.subspan(at, std::min(DirectPart::kMost, own.size() - at));
    const DirectPart part{.offset = at};
    body.assign(bytes_of(part).begin(), bytes_of(part).end());
    body.insert(body.end(), bytes.begin(), bytes.end());
    for (auto* peer : owner_.ring_peers_)
      if (peer != nullptr)
        if (!owner_.send(*peer, MessageHeader::direct, bucket_.index, bucket_.step.value, body))
          return;  // its `closed` event ends this operation
  }
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
