#include "ftar/communicator.h"

#include <xxhash.h>

#include <algorithm>

#include "base/events.h"
#include "base/fail.h"
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

Communicator::Communicator(transport::Engine& engine, const Options& options) : engine_(engine), options_(options) {}

Communicator::~Communicator() {
  for (auto& [member, peer] : peers_) engine_.close(peer->endpoint);
  for (auto& bucket : buckets_) {
    engine_.deregister(bucket.input);
    engine_.deregister(bucket.output);
  }
  engine_.deregister(staging_region_);
  engine_.deregister(coded_region_);
}

Result<> check(const Options& options) {
  constexpr std::size_t most = 1 * GiB;
  if (options.chunks_in_flight < 1 || options.chunks_in_flight > Tag::kMaxSlots)
    return fail(ErrorCode::invalid_argument, "{} chunks in flight; there must be 1 to {}", options.chunks_in_flight,
                Tag::kMaxSlots);
  if (options.chunk_bytes < 64 || options.chunk_bytes % 64 != 0 || options.chunk_bytes > most)
    return fail(ErrorCode::invalid_argument,
                "chunks of {} bytes; there must be 64 or a multiple of that, and at most {}", options.chunk_bytes,
                most);
  if (!(options.coding_error > 0 && options.coding_error <= 1))
    return fail(ErrorCode::invalid_argument, "a coding error of {}; it must be above 0 and at most 1",
                options.coding_error);
  return {};
}

Result<std::unique_ptr<Communicator>> Communicator::make(transport::Engine& engine, const Options& options, Member self,
                                                         std::vector<BucketSpec> buckets, Group group) {
  auto made = prepare(engine, options, std::move(buckets));
  if (made) (*made)->join(self, group);
  return made;
}

void Communicator::join(Member self, Group group) {
  self_ = self;
  group_ = group;
}

Result<std::unique_ptr<Communicator>> Communicator::prepare(transport::Engine& engine, const Options& options,
                                                            std::vector<BucketSpec> buckets) {
  static_assert(kMaxBuckets <= Tag::kMaxBuckets);
  if (buckets.empty() || buckets.size() > kMaxBuckets)
    return fail(ErrorCode::invalid_argument, "{} buckets; there must be 1 to {}", buckets.size(), kMaxBuckets);
  if (auto right = check(options); !right) return tl::unexpected(right.error());
  std::unique_ptr<Communicator> made(new Communicator(engine, options));
  const auto kind = options.device ? options.device->kind() : transport::MemoryKind::host;
  if (options.device) {
    made->reducer_ = options.shared_reducer;
    if (!made->reducer_) {
      auto chosen = options.reducer;
      chosen.codes = options.coding != Coding::off;
      auto reducer = device::Reducer::make(*options.device, chosen);
      if (!reducer) return tl::unexpected(reducer.error());
      made->reducer_ = std::move(*reducer);
    }
  }
  made->coder_ = options.device ? make_coder(options.device, made->reducer_) : make_host_coder();
  for (auto& spec : buckets) {
    const std::size_t bytes = spec.count * size_of(spec.type);
    if (bytes == 0)
      return fail(ErrorCode::invalid_argument, "bucket {} has no elements: leave it out", made->buckets_.size());
    if (spec.input.size() != bytes || spec.output.size() != bytes)
      return fail(ErrorCode::invalid_argument, "bucket {}: {} elements of {} need {} bytes; input has {}, output {}",
                  made->buckets_.size(), spec.count, to_string(spec.type), bytes, spec.input.size(),
                  spec.output.size());
    const auto largest = options.device ? options.chunk_bytes : std::min(options.chunk_bytes, kMostOfHost);
    if (const auto most = most_chunks(bytes, largest); most > Tag::kMaxChunks)
      return fail(ErrorCode::invalid_argument,
                  "bucket {} of {} may have {} chunks of {}, over the limit of {}: make chunks larger or buckets "
                  "smaller",
                  made->buckets_.size(), human_bytes(bytes), most, human_bytes(largest), Tag::kMaxChunks);
    auto& bucket = made->buckets_.emplace_back();
    bucket.spec = spec;
    bucket.index = static_cast<std::uint32_t>(made->buckets_.size() - 1);
    auto input = engine.register_region(spec.input, kind, transport::Access::local);
    if (!input) return tl::unexpected(input.error());
    bucket.input = *input;
    if (const auto viewable = engine.viewable(bucket.input)) bucket.viewable = *viewable;
    auto output = engine.register_region(spec.output, kind, transport::Access::remote_write);
    if (!output) return tl::unexpected(output.error());
    bucket.output = *output;
  }
  const bool coded = options.coding == Coding::eight || options.coding == Coding::four;  // whatever the link
  made->pulls_ =
      options.pull && !coded && !options.device &&
      std::ranges::all_of(made->buckets_, [](const Bucket& one) { return one.viewable.length == one.bytes(); });
  if (made->pulls_) made->pull_room_.resize(2 * kPullRoom);
  made->choose_direct();
  if (auto reserved = made->reserve_direct(); !reserved) return tl::unexpected(reserved.error());
  if (auto reserved = made->reserve_coding(); !reserved) return tl::unexpected(reserved.error());
  const std::size_t staged = options.chunk_bytes * options.chunks_in_flight;
  // The host's lies in a file: shared memory needs no right to read this process for it.
  auto memory = (options.device ? options.device : device::make_host())->allocate(staged);
  if (!memory) return tl::unexpected(memory.error());
  made->staging_ = std::move(*memory);
  auto staging = engine.register_region(made->staging_.bytes, kind, transport::Access::remote_write);
  if (!staging) return tl::unexpected(staging.error());
  made->staging_region_ = *staging;
  made->flushes_ = options.device && options.device->remote_writes() == device::Device::RemoteWrites::flushed &&
                   !engine.staged(*staging);
  return made;
}

// Everything that the members must agree on for their bytes to fit.
std::uint64_t Communicator::plan_hash() const {
  std::vector<std::uint64_t> facts{4,
                                   options_.chunk_bytes,
                                   options_.chunks_in_flight,
                                   options_.device ? options_.device_direct_bytes : options_.direct_bytes,
                                   options_.direct_members,
                                   options_.direct_memory,
                                   options_.both_ways};
  for (const auto& bucket : buckets_) {
    facts.push_back(static_cast<std::uint64_t>(bucket.spec.type));
    facts.push_back(bucket.spec.count);
  }
  return XXH3_64bits(facts.data(), facts.size() * sizeof facts[0]);
}

// ---- epochs

void Communicator::enter(Epoch epoch, std::vector<RingMember> ring, Chunking chunking) {
  REJOIN_CHECK(epoch > epoch_, "epoch {} after {}", epoch.value, epoch_.value);
  epoch_ = epoch;
  chunking_ = chunking;
  clean_ = announced_ = was_clean_ = false;
  const auto before = std::exchange(ring_, std::move(ring));
  // Contributors first, each kind in the order given.
  std::stable_partition(ring_.begin(), ring_.end(), [](const RingMember& p) { return p.role == Role::contributor; });
  positions_.clear();
  for (std::uint32_t i = 0; i < ring_.size(); ++i) positions_[ring_[i].member] = i;
  for (const auto& one : before)
    if (!positions_.contains(one.member))
      if (Peer* gone = peer_of(one.member)) remove(*gone);
  contributors_ = static_cast<std::uint32_t>(
      std::count_if(ring_.begin(), ring_.end(), [](const RingMember& p) { return p.role == Role::contributor; }));
  const auto self = positions_.find(self_);
  REJOIN_CHECK(self != positions_.end() && contributors_ > 0, "the ring of epoch {} lacks this member or contributors",
               epoch.value);
  position_ = self->second;
  for (auto& bucket : buckets_) {
    bucket.running.reset();
    bucket.wanted = false;
    bucket.offered.assign(doubled(bucket) ? places(bucket) : 0, 0);
    for (auto& inbox : bucket.inbox) {
      inbox.step = Step{};
      inbox.data.resize(bucket.bytes() * places(bucket));
      inbox.arrived.assign(places(bucket), 0);
    }
  }
  partners_ = partners();
  links_ = links_of(group_.links, position_, contributors_, static_cast<std::uint32_t>(ring_.size()));
  REJOIN_CHECK(std::ranges::includes(links_, partners_), "a partner of position {} of {} is no link of it", position_,
               ring_.size());
  ring_peers_.assign(ring_.size(), nullptr);
  for (auto& [member, peer] : peers_) {
    refresh(*peer);
    place(*peer);
  }
  last_progress_ = now_;
  try_flush();
}

// After a flush all our slots at the peer are free, and nothing has been announced.
void Communicator::refresh(Peer& peer) {
  peer.free_slots.clear();
  for (std::uint32_t slot = 0; slot < options_.chunks_in_flight; ++slot)
    peer.free_slots.push_back(static_cast<std::uint8_t>(slot));
  peer.ready.assign(buckets_.size(), 0);
}

// ---- operations

Result<> Communicator::all_reduce(std::uint32_t index, Step step, ReduceOp op, std::uint64_t weights) {
  if (index >= buckets_.size()) return fail(ErrorCode::invalid_argument, "bucket {} of {}", index, buckets_.size());
  if (epoch_ == Epoch{}) return fail(ErrorCode::unavailable, "no epoch yet: enter() comes first");
  Bucket& bucket = buckets_[index];
  if (bucket.wanted) return fail(ErrorCode::invalid_argument, "bucket {} is being reduced already", index);
  if (weights >= std::uint64_t{1} << 31)
    return fail(ErrorCode::invalid_argument, "bucket {} with weights of {} in all", index, weights);
  bucket.wanted = true;
  bucket.step = step;
  bucket.divisor = op == ReduceOp::sum ? 0 : weights > 0 ? static_cast<std::uint32_t>(weights) : contributors_;
  if (clean_) begin(bucket);
  return {};
}

// (x + x) / 2n has the bits of x / n: there is one way of dividing, on the CPU and on GPUs.
void Communicator::Bucket::take(BytesView alone, std::byte* out) const {
  if (divisor > 1) add(spec.type, out, alone.data(), alone.data(), alone.size() / size_of(spec.type), 2 * divisor);
  else std::memcpy(out, alone.data(), alone.size());
}

void Communicator::begin(Bucket& bucket) {
  if (device_failed_) return;
  last_progress_ = bucket.came_at = now_;
  bucket.longest_gap = {};
  bucket.longest_from = self_.replica;
  bucket.came = 0;
  events::record(events::Kind::bucket_begun,
                 {.epoch = epoch_.value, .step = bucket.step.value, .a = bucket.index, .b = bucket.bytes()});
  bucket.chunk_bytes = chunk_bytes(bucket);
  bucket.pulled = pulled(bucket);
  if (direct(bucket)) bucket.running = std::make_unique<DirectOperation>(*this, bucket);
  else if (doubled(bucket)) bucket.running = std::make_unique<DoublingOperation>(*this, bucket);
  else if (bucket.pulled) bucket.running = std::make_unique<PullOperation>(*this, bucket);
  else bucket.running = std::make_unique<RingOperation>(*this, bucket);
  bucket.running->start();
  if (bucket.running && bucket.running->done()) finish(bucket);
}

void Communicator::finish(Bucket& bucket) {
  bucket.digest = bucket.running->digest();
  adapt_coding(bucket);
  events::record(events::Kind::bucket_done, {.epoch = epoch_.value,
                                             .step = bucket.step.value,
                                             .replica = bucket.longest_from.value,
                                             .number = bucket.came,
                                             .a = bucket.index,
                                             .b = static_cast<std::uint64_t>(bucket.longest_gap.count())});
  bucket.running.reset();
  bucket.wanted = false;
  ++operations_done_;
  bytes_reduced_ += bucket.bytes();
  if (std::none_of(buckets_.begin(), buckets_.end(), [](const Bucket& b) { return b.running != nullptr; })) {
    for (auto& [member, peer] : peers_) peer->last_chunk = {};  // what follows is no gap, but the trainers' time
    if (reducer_) reducer_->rest();
  }
  if (auto flushed = flush(); !flushed) return fail_device(flushed.error());  // chunks of the all-gather came, too
  outcomes_.push_back({.kind = Outcome::Kind::done, .bucket = bucket.index, .step = bucket.step, .epoch = epoch_});
}

bool Communicator::working() const {
  if (device_works()) return true;
  return works_by_itself() &&
         std::ranges::any_of(buckets_, [](const Bucket& one) { return one.running && one.running->has_work(); });
}

// A turn of one operation that has something to do by itself.
void Communicator::work() {
  if (!works_by_itself()) return;
  for (auto& bucket : buckets_) {
    if (!bucket.running || !bucket.running->has_work()) continue;
    bucket.running->work();
    if (bucket.running && bucket.running->done()) finish(bucket);
    return;
  }
}

Result<> Communicator::flush() { return flushes_ ? options_.device->flush_remote_writes() : Result<>(); }

// Whether whoever adds took it.
bool Communicator::reduced_on_device(const Result<std::uint64_t>& work) {
  if (!work) fail_device(work.error());
  else given_to_device_ = *work;
  return work.has_value();
}

void Communicator::fail_device(const Error& error) {
  if (std::exchange(device_failed_, true)) return;
  outcomes_.push_back({.kind = Outcome::Kind::failed, .error = error});
}

void Communicator::poll_reducer() {
  if (!device_works() || device_failed_) return;
  const auto done = reducer_->done();
  if (!done) return fail_device(done.error());
  done_by_device_ = *done;
  for (auto& bucket : buckets_) {
    if (!bucket.running) continue;
    bucket.running->on_reduced(*done);
    if (bucket.running && bucket.running->done()) finish(bucket);
  }
  if (!device_works()) try_flush();
}

bool Communicator::busy() const {
  if (epoch_ != Epoch{} && !clean_) return true;
  return std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& b) { return b.wanted; });
}

std::span<const Outcome> Communicator::poll(TimePoint now) {
  now_ = now;
  for (const auto& event : engine_.poll()) handle(event);
  poll_reducer();
  work();
  handed_out_.clear();
  handed_out_.swap(outcomes_);
  return handed_out_;
}

void Communicator::handle(const transport::Event& event) {
  using transport::EventKind;
  if (event.kind == EventKind::accepted) return on_accepted(event);
  if (event.kind == EventKind::completed) return on_completed(event);
  Peer* peer = peer_of(event.endpoint);
  if (peer == nullptr) return;
  switch (event.kind) {
    case EventKind::connected: return introduce(*peer);
    case EventKind::message: return on_message(*peer, event.message);
    case EventKind::written: return on_written(*peer, event);
    case EventKind::closed: return lose(*peer, event.error.value_or(Error{ErrorCode::unavailable, "closed"}));
    case EventKind::accepted:
    case EventKind::completed: return;
  }
}

// ---- telling

std::vector<Wait> Communicator::waits(TimePoint now) const {
  std::vector<Wait> waits;
  const Duration since = now - last_progress_;
  if (epoch_ != Epoch{} && !clean_) return flush_waits(since);
  for (const auto& bucket : buckets_)
    if (bucket.running)
      if (auto wait = bucket.running->wait()) {
        wait->bucket = bucket.index;
        wait->step = bucket.step;
        wait->since = since;
        wait->on_trainers = true;
        waits.push_back(*wait);
      }
  return waits;
}

Stats Communicator::stats() const {
  Stats stats{.stale_dropped = stale_dropped_,
              .operations_done = operations_done_,
              .bytes_reduced = bytes_reduced_,
              .chunk_bytes_sent = chunk_bytes_sent_,
              .plain_bytes_sent = plain_bytes_sent_,
              .coded_chunks_sent = coded_chunks_sent_};
  if (reducer_) stats.kernel_launches = reducer_->launches();
  for (const auto& bucket : buckets_) {
    if (!bucket.coding) continue;
    stats.feedback_bytes += bucket.coding->feedback.bytes();
    stats.coding_error = std::max(stats.coding_error, bucket.coding->error);
  }
  for (const auto& [member, peer] : peers_) {
    stats.peers.push_back(peer->stats);
    stats.peers.back().member = member;
    stats.peers.back().recent_gap = peer->gaps.at(now_);
  }
  return stats;
}

}  // namespace rejoin::ftar
