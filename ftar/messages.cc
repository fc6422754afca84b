// A communicator's messages and chunks, to the other members and from them.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "ftar/operation.h"

namespace rejoin::ftar {

namespace {

constexpr std::size_t kLeastStreamed = 4 * MiB;  // of buckets: what is larger than the caches near a core

// Completion contexts: which write ended.
std::uint64_t context_of(Epoch epoch, std::uint32_t bucket, std::uint32_t kind) {
  return (epoch.value << 16) | (std::uint64_t{bucket} << 2) | kind;
}

}  // namespace

Result<> Communicator::send(Peer& peer, std::uint32_t kind, std::uint32_t bucket, std::uint64_t value, BytesView body) {
  const MessageHeader header{kind, bucket, epoch_.value, value};
  if (body.empty()) return engine_.send(peer.endpoint, bytes_of(header));
  Bytes message;
  message.reserve(sizeof header + body.size());
  const auto head = bytes_of(header);
  message.insert(message.end(), head.begin(), head.end());
  message.insert(message.end(), body.begin(), body.end());
  return engine_.send(peer.endpoint, message);
}

bool Communicator::post(Peer& peer, std::uint32_t bucket, std::uint32_t kind, const transport::LocalRange& local,
                        const transport::RemoteRange& remote, std::size_t length, std::uint32_t slot,
                        std::uint32_t chunk, std::uint32_t form) {
  const Tag tag{static_cast<std::uint32_t>(epoch_.value),
                static_cast<std::uint32_t>(buckets_[bucket].step.value),
                bucket,
                kind,
                slot,
                chunk,
                form};
  const auto width = RingOperation::width_of(form);
  // Otherwise it is read at once, to be added up or decoded.
  const bool final = kind != Tag::kReduceScatter && width == coding::Width::plain;
  const transport::Write write{.context = context_of(epoch_, bucket, kind),
                               .local = local,
                               .remote = remote,
                               .length = length,
                               .notify = tag.packed(),
                               .streamed = final && buckets_[bucket].bytes() >= kLeastStreamed,
                               .digested = final && digesting_ && !reducer_};
  if (!engine_.write(peer.endpoint, {&write, 1})) return false;  // its `closed` event is on the way
  ++peer.writes_in_flight;
  peer.rate.on_posted(length, now_);
  chunk_bytes_sent_ += length;
  peer.stats.coded_bits = static_cast<std::uint32_t>(width);
  if (width == coding::Width::plain) return plain_bytes_sent_ += length, true;
  plain_bytes_sent_ += length / coding::bytes_of_block(buckets_[bucket].spec.type, width) * coding::kPlainBlock;
  ++coded_chunks_sent_;
  return true;
}

void Communicator::on_message(Peer& peer, BytesView message) {
  MessageHeader header{};
  if (!take(message, header)) {
    ++stale_dropped_;
    return;
  }
  if (header.kind == MessageHeader::introduction) return on_introduction(peer, header.value, message);
  if (header.kind == MessageHeader::coding) return on_coding(peer, header.value, message);
  if (header.kind == MessageHeader::surplus) return on_surplus(peer, Epoch(header.epoch));
  if (header.kind == MessageHeader::flushed) return on_flushed(peer, Epoch(header.epoch));
  if (header.epoch != epoch_.value || header.bucket >= buckets_.size() || !peer.up) {
    ++stale_dropped_;
    return;
  }
  Bucket& bucket = buckets_[header.bucket];
  switch (header.kind) {
    case MessageHeader::ready:
      if (!message.empty() && !take(message, peer.inputs[header.bucket])) {
        ++stale_dropped_;
        return;
      }
      peer.ready[header.bucket] = header.value + 1;
      if (bucket.running) bucket.running->on_ready(peer);
      break;
    case MessageHeader::credit:
      if (header.value < options_.chunks_in_flight && peer.free_slots.size() < options_.chunks_in_flight) {
        peer.free_slots.push_back(static_cast<std::uint8_t>(header.value));
        for (auto& waiting : buckets_)
          if (waiting.running) waiting.running->on_credit();
      }
      break;
    case MessageHeader::direct:
      if (bucket.running) bucket.on_came(peer, now_);
      if (on_direct_part(peer, bucket, Step(header.value), message)) break;
      ++stale_dropped_;
      return;
    default: ++stale_dropped_; return;
  }
  if (bucket.running && bucket.running->done()) finish(bucket);
}

void Communicator::on_written(Peer& peer, const transport::Event& event) {
  const Tag tag = Tag::unpack(event.value);
  if (tag.epoch != (epoch_.value & 0xfff) || tag.bucket >= buckets_.size()) {
    ++stale_dropped_;
    return;
  }
  Bucket& bucket = buckets_[tag.bucket];
  if (!bucket.running || tag.step != (bucket.step.value & 0x3f) ||
      !bucket.running->on_chunk(peer, tag, event.digested)) {
    ++stale_dropped_;
    return;
  }
  last_progress_ = now_;
  bucket.on_came(peer, now_);
  ++peer.stats.chunks_received;
  if (peer.last_chunk != TimePoint{}) {
    peer.stats.longest_gap = std::max(peer.stats.longest_gap, now_ - peer.last_chunk);
    peer.gaps.add(now_ - peer.last_chunk, now_);
  }
  peer.last_chunk = now_;
  if (bucket.running->done()) finish(bucket);
}

void Communicator::on_completed(const transport::Event& event) {
  Peer* peer = peer_of(event.endpoint);
  if (peer == nullptr) return;
  REJOIN_CHECK(peer->writes_in_flight > 0, "a completion that was not waited for");
  --peer->writes_in_flight;
  peer->rate.on_completed(now_);
  if (!event.error) last_progress_ = now_;  // over a slow link it goes on, too
  if (event.error && event.error->code == ErrorCode::refused)
    logger().error("replica {} refused a chunk: {}", peer->member.replica, event.error->message);
  if ((event.value >> 16) != epoch_.value || !clean_) return try_flush();
  if (event.error) return;  // its endpoint's end is reported by itself
  Bucket& bucket = buckets_[(event.value >> 2) & 0x3fff];
  if (!bucket.running) return;
  bucket.running->on_write_completed(*peer, event.value & 3);
  if (bucket.running->done()) finish(bucket);
}

}  // namespace rejoin::ftar
