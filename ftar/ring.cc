// The bandwidth-optimal all-reduce: schedule.h says who sends what; here it happens, chunk by chunk.
#include <fmt/format.h>

#include <algorithm>

#include "base/digest.h"
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

ChunkedOperation::ChunkedOperation(Communicator& owner, Communicator::Bucket& bucket)
    : owner_(owner),
      bucket_(bucket),
      schedule_(owner.shape_of(bucket)),
      contributes_(owner.position_ < owner.contributors_),
      chunks_(schedule_.all_chunks()),
      digesting_(owner.digesting_ && !owner.reducer_) {
  final_.resize(std::size_t{owner.contributors_} * schedule_.stride());
  if (digesting_) digests_.resize(final_.size());
}

bool ChunkedOperation::peer_ready(const Peer& peer) const {
  return peer.ready[bucket_.index] == bucket_.step.value + 1;
}

void ChunkedOperation::make_final(std::uint32_t chunk) {
  if (final_[chunk]) return;
  final_[chunk] = true;
  ++final_count_;
}

bool ChunkedOperation::take_final(Peer& from, std::uint32_t chunk, std::span<std::byte> arrived) {
  from.stats.bytes_received += arrived.size();
  make_final(chunk);
  return !owner_.damage_if_due(bucket_.step, arrived);
}

// After it has been sent on, so that nobody waits for this; unless the transport has taken it on the way.
void ChunkedOperation::take_digest(std::uint32_t chunk, const std::optional<transport::Digested>& known) {
  if (!digesting_) return;
  const Range range = schedule_.chunk(chunk);
  const auto bytes = BytesView(bucket_.spec.output).subspan(range.offset, range.length);
  const auto digest = known ? known->of(bytes) : std::nullopt;
  digests_[chunk] = digest ? *digest : rejoin::digest(bytes);
}

std::optional<std::uint64_t> ChunkedOperation::digest() const {
  if (!digesting_) return std::nullopt;
  std::uint64_t all = 0;
  for (std::uint32_t chunk = 0; chunk < digests_.size(); ++chunk)
    if (schedule_.valid(chunk)) all = combine_digests(all, digests_[chunk]);
  return all;
}

RingOperation::RingOperation(Communicator& owner, Communicator::Bucket& bucket)
    : ChunkedOperation(owner, bucket), alone_(contributes_ && owner.contributors_ == 1) {
  const std::uint32_t p = owner.position_, n = owner.contributors_;
  const auto members = static_cast<std::uint32_t>(owner.ring_.size());
  partial_.resize(final_.size());
  taken_.resize(final_.size());
  if (contributes_ && n > 1) {
    scatter_to_ = owner.ring_peers_[(p + 1) % n];
    scatter_from_ = owner.ring_peers_[(p + n - 1) % n];
    scatter_sends_ = schedule_.reduce_scatter_sends(p);
    scatter_own_ = schedule_.chunks_of((p + n - 1) % n);
  }
  if (members > 1) {
    right_.to = owner.ring_peers_[(p + 1) % members];
    right_.sends = schedule_.all_gather_sends(p, Schedule::Direction::right);
    left_.to = owner.ring_peers_[(p + members - 1) % members];
    left_.sends = schedule_.all_gather_sends(p, Schedule::Direction::left);
  }
  begin_coding();
}

void RingOperation::start() {
  // Whoever sends to us may do so from now on.
  std::vector<Peer*> senders;
  for (auto* peer : {scatter_from_, left_.to, right_.to})
    if (peer != nullptr && std::find(senders.begin(), senders.end(), peer) == senders.end()) senders.push_back(peer);
  for (auto* peer : senders)
    if (!owner_.send(*peer, MessageHeader::ready, bucket_.index, bucket_.step.value)) return;  // `closed` follows
  if (alone_ && owner_.reducer_) {
    const auto& [type, count, in, out, exact] = bucket_.spec;
    if (coding_ != nullptr)
      while (taken_alone_ < schedule_.chunks_of(0)) code_alone(schedule_.chunk_id(0, taken_alone_++));
    else
      give(bucket_.divisor > 1
               ? owner_.reducer_->add(type, out.data(), in.data(), in.data(), count, 2 * bucket_.divisor)
               : owner_.reducer_->copy(out.data(), in.data(), bucket_.bytes()),
           {});
  }
  pump();
}

bool RingOperation::has_work() const { return alone_ && !owner_.reducer_ && taken_alone_ < schedule_.chunks_of(0); }

// One chunk, so that the rest of the process gets its turn.
void RingOperation::work() {
  const std::uint32_t chunk = schedule_.chunk_id(0, taken_alone_++);
  owner_.last_progress_ = owner_.now_;
  if (coding_ != nullptr) {
    code_alone(chunk);
    return pump();
  }
  const Range range = schedule_.chunk(chunk);
  bucket_.take(bucket_.spec.input.subspan(range.offset, range.length), bucket_.spec.output.data() + range.offset);
  make_final(chunk);
  pump();
  take_digest(chunk);
}

bool RingOperation::all_sent() const {
  return scatter_next_ == scatter_sends_.size() && right_.next == right_.sends.size() &&
         left_.next == left_.sends.size();
}

void RingOperation::pump() {
  pump_reduce_scatter();
  pump_gather(right_);
  pump_gather(left_);
}

void RingOperation::pump_reduce_scatter() {
  if (scatter_to_ == nullptr || !peer_ready(*scatter_to_)) return;
  while (scatter_next_ < scatter_sends_.size() && !scatter_to_->free_slots.empty()) {
    const std::uint32_t chunk = scatter_sends_[scatter_next_];
    const bool own = scatter_next_ < scatter_own_;
    if (!own && !partial_[chunk]) return;
    if (own && coding_ != nullptr && !own_is_coded()) return;
    const Source source = source_of(chunk, own, scatter_to_->coded_room.has_value());
    const std::uint8_t slot = scatter_to_->free_slots.back();
    if (!owner_.post(*scatter_to_, bucket_.index, Tag::kReduceScatter, source.local,
                     {scatter_to_->staging, slot * owner_.options_.chunk_bytes}, source.length, slot, chunk,
                     source.form))
      return;
    scatter_to_->free_slots.pop_back();
    ++outstanding_;
    ++scatter_next_;
  }
}

void RingOperation::pump_gather(Gather& gather) {
  if (gather.to == nullptr || !peer_ready(*gather.to)) return;
  while (gather.next < gather.sends.size() && gather.in_flight < owner_.options_.chunks_in_flight) {
    const std::uint32_t chunk = gather.sends[gather.next];
    if (!final_[chunk]) return;
    const Source source = source_of(chunk, false, gather.to->coded_room.has_value());
    const std::uint32_t direction = &gather == &right_ ? 0 : 1;
    // As it lies here: coded in the room for that, otherwise in the output.
    const bool coded = width_of(source.form) != coding::Width::plain;
    if (!coded && coding_ != nullptr && decoding_[chunk]) return;
    if (!owner_.post(*gather.to, bucket_.index, Tag::kAllGather + direction, source.local,
                     {coded ? *gather.to->coded_room : gather.to->outputs[bucket_.index], source.local.offset},
                     source.length, 0, chunk, source.form))
      return;
    ++gather.in_flight;
    ++outstanding_;
    ++gather.next;
  }
}

void RingOperation::make_all_final() {
  for (std::uint32_t i = 0; i < schedule_.chunks_of(0); ++i) make_final(schedule_.chunk_id(0, i));
}

bool RingOperation::on_chunk(Peer& from, const Tag& tag, const std::optional<transport::Digested>& digested) {
  const bool coded = width_of(tag.form) != coding::Width::plain;
  if (!schedule_.valid(tag.chunk) || (tag.form != Tag::kPlain && coding_ == nullptr)) return false;
  if (tag.kind == Tag::kReduceScatter) return on_reduce_scatter_chunk(from, tag);
  if (final_[tag.chunk]) return false;
  const std::size_t length = length_of(tag.chunk, tag.form);
  std::byte* arrived = coded ? coded_place(tag.chunk) : bucket_.spec.output.data() + schedule_.chunk(tag.chunk).offset;
  const bool as_it_came = take_final(from, tag.chunk, {arrived, length});
  if (coding_ != nullptr) forms_[tag.chunk] = static_cast<std::uint8_t>(tag.form);
  // Who takes it as it has come need not wait until it is decoded.
  const bool passed_on = coded && takes_coded(right_) && takes_coded(left_);
  if (coded && !passed_on) decode(tag.chunk);
  pump_gather(right_);
  pump_gather(left_);
  if (passed_on) decode(tag.chunk);
  take_digest(tag.chunk, as_it_came ? digested : std::nullopt);
  return true;
}

// Whether nobody adds to this chunk after this member.
bool RingOperation::is_last(std::uint32_t chunk) const {
  return schedule_.receive_round(owner_.position_, schedule_.segment_of(chunk)) + 2 == owner_.contributors_;
}

// The fused pass: what arrived, plus our own input, goes to its place in the output, from where it is sent on.
bool RingOperation::on_reduce_scatter_chunk(Peer& from, const Tag& tag) {
  if (&from != scatter_from_ || tag.slot >= owner_.options_.chunks_in_flight) return false;
  if (taken_[tag.chunk] || final_[tag.chunk]) return false;
  taken_[tag.chunk] = true;
  const Range range = schedule_.chunk(tag.chunk);
  const std::size_t count = range.length / size_of(bucket_.spec.type);
  std::byte* out = bucket_.spec.output.data() + range.offset;
  const std::byte* arrived = owner_.staging_.bytes.data() + tag.slot * owner_.options_.chunk_bytes;
  const std::byte* own = bucket_.spec.input.data() + range.offset;
  const std::uint32_t divisor = is_last(tag.chunk) ? bucket_.divisor : 0;
  from.stats.bytes_received += length_of(tag.chunk, tag.form);
  ++scatter_received_;
  const auto sum = [&]() -> Result<std::uint64_t> {
    if (coding_ != nullptr) return add_coded(tag, arrived);
    return owner_.coder_->run(
        {.type = bucket_.spec.type, .count = count, .own = own, .arrived = arrived, .divisor = divisor, .out = out},
        nullptr);
  };
  give(owner_.flush().and_then(sum), GivenWork::hop(from, tag));
  return true;
}

void RingOperation::give(const Result<std::uint64_t>& number, GivenWork work) {
  if (!owner_.reduced_on_device(number)) return;
  if (*number == 0) return on_done(work);
  work.number = *number;
  on_device_.push_back(work);
}

void RingOperation::on_done(const GivenWork& work) {
  switch (work.of) {
    case GivenWork::Of::all: return make_all_final();
    case GivenWork::Of::hop: return on_reduced(*work.from, work.tag);
    case GivenWork::Of::own: ++scatter_coded_, partial_[work.chunk] = true; return;
    case GivenWork::Of::alone: make_final(work.chunk), take_digest(work.chunk); return;
    case GivenWork::Of::decoded: decoding_[work.chunk] = false; return;
    case GivenWork::Of::nothing_more: return;
  }
}

void RingOperation::on_reduced(std::uint64_t number) {
  bool any = false;
  for (; !on_device_.empty() && on_device_.front().number <= number; any = true) {
    const GivenWork work = on_device_.front();
    on_device_.pop_front();
    on_done(work);
  }
  if (any) pump();
}

void RingOperation::on_reduced(Peer& from, const Tag& tag) {
  // The slot is free again. A failed send means that the endpoint has failed, and its event ends this operation.
  (void)owner_.send(from, MessageHeader::credit, bucket_.index, tag.slot);
  if (is_last(tag.chunk)) {
    make_final(tag.chunk);
    pump_gather(right_);
    pump_gather(left_);
    take_digest(tag.chunk);
  } else {
    partial_[tag.chunk] = true;
    pump_reduce_scatter();
  }
}

void RingOperation::on_write_completed(Peer&, std::uint32_t kind) {
  --outstanding_;
  if (kind == Tag::kReduceScatter) return;
  Gather& gather = kind == Tag::kAllGather ? right_ : left_;
  --gather.in_flight;
  pump_gather(gather);
}

std::optional<Wait> RingOperation::wait() const {
  if (has_work()) return std::nullopt;  // for nobody
  Wait wait;
  const std::uint32_t p = owner_.position_, n = owner_.contributors_;
  const auto on = [&](Peer* peer, std::string what) {
    if (peer != nullptr) wait.on = peer->member;
    wait.what = std::move(what);
    return wait;
  };
  if (!on_device_.empty())
    return on(nullptr, fmt::format("{} chunks that its GPU adds up or codes", on_device_.size()));
  for (auto* peer : {scatter_to_, right_.to, left_.to})
    if (peer != nullptr && !peer_ready(*peer)) return on(peer, fmt::format("its start of bucket {}", bucket_.index));
  if (contributes_ && n > 1) {
    std::uint32_t expected = 0;
    for (std::uint32_t s = 0; s < n; ++s)
      if (s != (p + n - 1) % n) expected += schedule_.chunks_of(s);
    if (scatter_received_ < expected)
      return on(scatter_from_, fmt::format("chunk {} of {} of the reduce-scatter", scatter_received_ + 1, expected));
  }
  const auto missing = std::find(final_.begin(), final_.end(), false);
  for (auto it = missing; it != final_.end(); ++it) {
    const auto chunk = static_cast<std::uint32_t>(it - final_.begin());
    if (final_[chunk] || !schedule_.valid(chunk)) continue;
    const bool from_left = schedule_.all_gather_receives(p, schedule_.segment_of(chunk), Schedule::Direction::right);
    return on(from_left ? left_.to : right_.to,
              fmt::format("chunk {} of {} of the all-gather", final_count_ + 1, chunks_));
  }
  // All is here, and whoever has not taken what goes to it keeps this member: of the two neighbours the one that lacks
  // more of it.
  const auto lacking = [](const Gather& gather) { return gather.sends.size() - gather.next + gather.in_flight; };
  const Gather& behind = lacking(left_) > lacking(right_) ? left_ : right_;
  if (lacking(behind) > 0) return on(behind.to, fmt::format("{} writes to its memory", lacking(behind)));
  if (outstanding_ > 0) return on(scatter_to_, fmt::format("{} writes to its memory", outstanding_));
  return std::nullopt;
}

}  // namespace rejoin::ftar
