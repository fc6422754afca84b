// The all-reduce of members that can look into each other's memory, within one machine: no chunk is staged. Each
// contributor adds up one segment of all inputs, where they lie, and writes the chunks of the sum to everybody. So each
// byte of an input is read once, and each of an output written once; a ring moves a partial sum at each hop besides.
//
// Nobody tells that an input has been read: who has a chunk of the sum knows that it was read for it, and is done only
// when it has all of them.
#include <fmt/format.h>

#include <algorithm>

#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

PullOperation::PullOperation(Communicator& owner, Communicator::Bucket& bucket)
    : ChunkedOperation(owner, bucket), own_chunks_(contributes_ ? schedule_.chunks_of(owner.position_) : 0) {
  to_.resize(owner.ring_.size());
  if (bucket.coding == nullptr) return;  // nothing is coded here: what was lost before is of another step
  bucket.coding->feedback.forget();
  bucket.coding->loss = std::make_shared<coding::Loss>();
}

void PullOperation::start() {
  const Bytes where = contributes_ ? joined(bucket_.viewable, {}) : Bytes();
  for (auto* peer : owner_.ring_peers_)
    if (peer != nullptr && !owner_.send(*peer, MessageHeader::ready, bucket_.index, bucket_.step.value, where))
      return;  // `closed` follows
}

std::optional<std::uint32_t> PullOperation::waits_to_start() const {
  for (std::uint32_t i = 0; i < owner_.contributors_; ++i)
    if (i != owner_.position_ && !peer_ready(*owner_.ring_peers_[i])) return i;
  return std::nullopt;
}

bool PullOperation::has_work() const { return reduced_ < own_chunks_ && !waits_to_start(); }

// One chunk, so that the rest of the process gets its turn.
void PullOperation::work() {
  const std::uint32_t chunk = schedule_.chunk_id(owner_.position_, reduced_);
  const Range whole = schedule_.chunk(chunk);
  for (std::size_t at = 0; at < whole.length; at += Communicator::kPullRoom)
    if (!reduce({whole.offset + at, std::min(Communicator::kPullRoom, whole.length - at)})) return;
  ++reduced_;
  owner_.last_progress_ = owner_.now_;
  make_final(chunk);
  for (std::uint32_t to = 0; to < to_.size(); ++to) pump(to);
  take_digest(chunk);
}

// In the order of a ring, and with its bits. False where a peer, and so this operation, is lost.
bool PullOperation::reduce(const Range& range) {
  const std::uint32_t n = owner_.contributors_, p = owner_.position_;
  const std::size_t count = range.length / size_of(bucket_.spec.type);
  std::byte* out = bucket_.spec.output.data() + range.offset;
  BytesView sum;
  for (std::uint32_t i = 1; i <= n; ++i) {
    BytesView next = BytesView(bucket_.spec.input).subspan(range.offset, range.length);
    if (i < n) {
      Peer& peer = *owner_.ring_peers_[(p + i) % n];
      const auto room = std::span(owner_.pull_room_).subspan(i % 2 * Communicator::kPullRoom, range.length);
      const auto seen = owner_.engine_.view(peer.endpoint, peer.inputs[bucket_.index], range.offset, room);
      if (!seen) return owner_.lose(peer, seen.error()), false;
      next = *seen;
    }
    if (i > 1) add(bucket_.spec.type, out, sum.data(), next.data(), count, i == n ? bucket_.divisor : 0);
    sum = i > 1 ? BytesView(out, range.length) : next;
  }
  return true;
}

// What is there for this member goes to it.
void PullOperation::pump(std::uint32_t to) {
  Peer* peer = to < to_.size() ? owner_.ring_peers_[to] : nullptr;  // somebody connected may have no place in this ring
  if (peer == nullptr || !peer_ready(*peer)) return;
  Sent& sent = to_[to];
  for (; sent.next < reduced_ && sent.in_flight < kMostInFlight; ++sent.next, ++sent.in_flight, ++outstanding_) {
    const std::uint32_t chunk = schedule_.chunk_id(owner_.position_, sent.next);
    const Range range = schedule_.chunk(chunk);
    if (!owner_.post(*peer, bucket_.index, Tag::kAllGather, {bucket_.output, range.offset},
                     {peer->outputs[bucket_.index], range.offset}, range.length, 0, chunk, Tag::kPlain))
      return;
  }
}

void PullOperation::on_ready(Peer& from) { pump(from.position); }

void PullOperation::on_write_completed(Peer& to, std::uint32_t) {
  --outstanding_;
  --to_[to.position].in_flight;
  pump(to.position);
}

bool PullOperation::on_chunk(Peer& from, const Tag& tag, const std::optional<transport::Digested>& digested) {
  if (!schedule_.valid(tag.chunk) || tag.kind != Tag::kAllGather || final_[tag.chunk]) return false;
  if (schedule_.segment_of(tag.chunk) != from.position) return false;
  const Range range = schedule_.chunk(tag.chunk);
  const auto arrived = bucket_.spec.output.subspan(range.offset, range.length);
  take_digest(tag.chunk, take_final(from, tag.chunk, arrived) ? digested : std::nullopt);
  return true;
}

bool PullOperation::done() const {
  if (final_count_ < chunks_ || outstanding_ > 0) return false;
  for (std::uint32_t to = 0; to < to_.size(); ++to)
    if (to != owner_.position_ && to_[to].next < own_chunks_) return false;
  return true;
}

std::optional<Wait> PullOperation::wait() const {
  if (has_work()) return std::nullopt;  // for nobody
  const auto on = [&](std::uint32_t position, std::string what) {
    return Wait{.on = owner_.ring_[position].member, .what = std::move(what)};
  };
  const auto start_of = [&](std::uint32_t i) { return on(i, fmt::format("its start of bucket {}", bucket_.index)); };
  if (reduced_ < own_chunks_)
    if (const auto late = waits_to_start()) return start_of(*late);
  for (std::uint32_t chunk = 0; chunk < final_.size(); ++chunk)
    if (!final_[chunk] && schedule_.valid(chunk) && schedule_.segment_of(chunk) != owner_.position_)
      return on(schedule_.segment_of(chunk), fmt::format("chunk {} of {} of the sums", final_count_ + 1, chunks_));
  for (std::uint32_t to = 0; to < to_.size(); ++to) {
    if (to != owner_.position_ && to_[to].next < own_chunks_ && to_[to].in_flight == 0) return start_of(to);
    if (to_[to].in_flight > 0) return on(to, fmt::format("{} writes to its memory", to_[to].in_flight));
  }
  return std::nullopt;
}

}  // namespace rejoin::ftar
