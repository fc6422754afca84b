// Inside of a communicator: peers, buckets, and the operations that run on them.
#pragma once

#include <deque>

#include "base/recent_longest.h"
#include "ftar/coded.h"
#include "ftar/communicator.h"
#include "ftar/link_rate.h"
#include "ftar/schedule.h"

namespace rejoin::ftar {

// What a write's notification carries. Fields that wrap (epoch, step) tell neighbours in time apart, which is all that
// is needed: the flush of enter() lets nothing older through.
struct Tag {
  std::uint32_t epoch, step, bucket, kind, slot, chunk, form = kPlain;
  static constexpr std::uint32_t kReduceScatter = 0, kAllGather = 1;
  // How the chunk is coded. It may be plain and have come over a slow link before: whoever makes the result of it codes
  // that. Only those that have said that they take coded chunks are sent other forms than `plain`.
  static constexpr std::uint32_t kPlain = 0, kPlainAfterSlow = 1, kEight = 2, kFour = 3;
  static constexpr std::uint64_t kMaxBuckets = 1 << 12, kMaxChunks = 1 << 24, kMaxSlots = 1 << 6;

  std::uint64_t packed() const {
    return (std::uint64_t{epoch & 0xfff} << 52) | (std::uint64_t{step & 0x3f} << 46) | (std::uint64_t{form} << 44) |
           (std::uint64_t{bucket} << 32) | (std::uint64_t{kind} << 30) | (std::uint64_t{slot} << 24) | chunk;
  }
  static Tag unpack(std::uint64_t bits) {
    return {static_cast<std::uint32_t>(bits >> 52) & 0xfff, static_cast<std::uint32_t>(bits >> 46) & 0x3f,
            static_cast<std::uint32_t>(bits >> 32) & 0xfff, static_cast<std::uint32_t>(bits >> 30) & 0x3,
            static_cast<std::uint32_t>(bits >> 24) & 0x3f,  static_cast<std::uint32_t>(bits) & 0xffffff,
            static_cast<std::uint32_t>(bits >> 44) & 0x3};
  }
};

// What a member can do, in its introduction's value.
constexpr std::uint64_t kPulls = 1;  // it lets others look at its inputs, and looks at theirs

// Messages between members: this header, then the kind's body. Of `ready` that is where its input lies
// (ViewableRegion), where the others pull.
struct MessageHeader {
  enum Kind : std::uint32_t { introduction = 1, flushed, ready, credit, direct, surplus, coding };
  static constexpr std::uint64_t kCodingLayout = 1;  // of coded chunks, and of the room for them
  std::uint32_t kind;
  std::uint32_t bucket;
  std::uint64_t epoch;
  std::uint64_t value;  // the step; of a credit, the slot; of `coding`, the layout
};

// The body of `direct`: where the bytes that follow belong among what the receiver gets for this bucket. `place`: the
// sender's position, or where sums are exchanged in rounds Doubling's. The parts of a place come in order.
struct DirectPart {
  std::uint64_t place, offset;
  static constexpr std::size_t kMost = 32 * KiB;  // so that one is read while the next is sent
};
static_assert(sizeof(MessageHeader) + sizeof(DirectPart) + DirectPart::kMost <= transport::Engine::kMaxMessage);

struct Peer {
  Member member;
  transport::EndpointId endpoint;
  bool up = false;
  bool called = false;  // by this member
  TimePoint since{};    // when it was begun
  transport::RemoteRegion staging;
  std::vector<transport::RemoteRegion> outputs;  // by bucket
  bool pulls = false;
  std::vector<transport::ViewableRegion> inputs;      // by bucket, of who pulls, from its `ready` on
  std::optional<transport::RemoteRegion> coded_room;  // it takes coded chunks
  LinkRate rate;                                      // of our writes to it
  bool slow = false;                                  // … by which they are coded
  bool partner = false;                               // in this epoch: the two send each other something
  bool surplus = false;                               // … both are members, and not to be connected
  Epoch offered, heard_surplus;          // the last in which this member, resp. the peer, has said that it is
  Epoch flushed;                         // its writes of older epochs are over
  Epoch met;                             // the last epoch in which it may have written here
  Epoch flush_sent;                      // the last of our own flushes that it has been sent
  std::size_t writes_in_flight = 0;      // ours, to it
  std::vector<std::uint8_t> free_slots;  // of its staging, for us
  std::vector<std::uint64_t> ready;      // by bucket: the step it has started, plus one
  PeerStats stats;
  TimePoint last_chunk{};
  RecentLongest gaps;  // between chunks of one all-reduce

  bool fenced() const { return met == Epoch{} || flushed > met; }  // none of its writes of older epochs can land
};

// One all-reduce under one epoch. Created at the start, destroyed when done or when its epoch ends.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual void start() = 0;
  virtual void on_ready(Peer&) {}
  virtual void on_credit() {}
  virtual bool on_chunk(Peer&, const Tag&) { return false; }  // false: does not belong here
  virtual void on_write_completed(Peer&, std::uint32_t /*kind*/) {}
  virtual void on_direct() {}
  virtual void on_reduced(std::uint64_t /*number*/) {}  // the device has done its works up to this
  virtual bool has_work() const { return false; }       // something to do that no event announces
  virtual void work() {}                                // … some of it
  virtual bool done() const = 0;
  // Of the result, once done; nothing where none was wanted, or the result is in a device's memory.
  virtual std::optional<std::uint64_t> digest() const = 0;
  virtual std::optional<Wait> wait() const = 0;
};

struct Communicator::Bucket {
  BucketSpec spec;
  std::uint32_t index = 0;
  transport::RegionId input, output;
  transport::ViewableRegion viewable;  // the input; of no length where nobody can look at it
  std::unique_ptr<Operation> running;
  bool wanted = false;  // asked for, and not done in this epoch yet
  Step step;
  std::uint32_t divisor = 0;  // of a mean: what the sum is divided by
  // What comes of small buckets, by step parity (a peer can be one step ahead, never two), then by place.
  struct Inbox {
    Step step;
    Bytes data;
    std::vector<std::size_t> arrived;  // bytes of each
  };
  Inbox inbox[2];
  bool small = false;  // skips the ring
  // Of the all-reduce under way, for the flight recorder: when something came last, the longest time without anything,
  // who ended it, and what has come.
  TimePoint came_at{};
  Duration longest_gap{};
  ReplicaId longest_from;
  std::uint32_t came = 0;
  std::vector<std::uint64_t> offered;    // by place: digests of the sums that this member sent in Doubling's rounds
  std::optional<std::uint64_t> digest;   // of the last result
  std::unique_ptr<BucketCoding> coding;  // none: it goes as it is
  // Of a device, for a bucket small enough: pinned room for this member's own input, and for the result.
  std::span<std::byte> own, result;

  std::size_t bytes() const { return spec.count * size_of(spec.type); }
  void on_came(const Peer& from, TimePoint now) {
    ++came;
    const Duration gap = now - std::exchange(came_at, now);
    if (gap <= longest_gap) return;
    longest_gap = gap;
    longest_from = from.member.replica;
  }
  // What this member contributes, in the host's memory.
  BytesView contribution() const { return own.empty() ? BytesView(spec.input) : BytesView(own); }
  // Makes the result of what a single contributor has, in the host's memory.
  void take(BytesView alone, std::byte* out) const;
};

// Of a bucket that goes in chunks, of which each becomes final once.
class ChunkedOperation : public Operation {
 public:
  ChunkedOperation(Communicator& owner, Communicator::Bucket& bucket);
  std::optional<std::uint64_t> digest() const final;

 protected:
  bool peer_ready(const Peer& peer) const;
  void make_final(std::uint32_t chunk);
  void take_final(Peer& from, std::uint32_t chunk, std::span<std::byte> arrived);
  void take_digest(std::uint32_t chunk);

  Communicator& owner_;
  Communicator::Bucket& bucket_;
  const Schedule schedule_;
  const bool contributes_;
  std::vector<bool> final_;  // by chunk: the output holds the result
  std::uint32_t final_count_ = 0, chunks_ = 0;

 private:
  const bool digesting_;
  std::vector<std::uint64_t> digests_;  // by chunk
};

class RingOperation final : public ChunkedOperation {
 public:
  RingOperation(Communicator& owner, Communicator::Bucket& bucket);
  void start() override;
  void on_ready(Peer&) override { pump(); }
  void on_credit() override { pump(); }
  bool on_chunk(Peer& from, const Tag& tag) override;
  void on_write_completed(Peer& to, std::uint32_t kind) override;
  void on_reduced(std::uint64_t number) override;
  bool done() const override { return final_count_ == chunks_ && outstanding_ == 0 && all_sent(); }
  std::optional<Wait> wait() const override;

 private:
  struct Gather {  // one direction of the all-gather
    Peer* to = nullptr;
    std::vector<std::uint32_t> sends;
    std::size_t next = 0;
    std::uint32_t in_flight = 0;
  };
  bool all_sent() const;
  void pump();
  void pump_reduce_scatter();
  void pump_gather(Gather& gather);
  bool on_reduce_scatter_chunk(Peer& from, const Tag& tag);
  bool is_last(std::uint32_t chunk) const;
  void on_reduced(Peer& from, const Tag& tag);
  void make_all_final();

  // coded_ring.cc
  struct Source {
    transport::LocalRange local;
    std::size_t length = 0;
    std::uint32_t form = Tag::kPlain;
  };
  void begin_coding();
  bool takes_coded(const Gather& gather) const;
  static std::uint32_t form_of(coding::Width width, bool slow);
  static coding::Width width_of(std::uint32_t form);
  std::size_t length_of(std::uint32_t chunk, std::uint32_t form) const;  // bytes, as it travels
  std::byte* coded_place(std::uint32_t chunk) const;
  Source source_of(std::uint32_t chunk, bool own, bool takes_coded) const;
  void code_own(std::uint32_t chunk);
  void combine(std::uint32_t chunk, const std::byte* arrived, std::uint32_t form, coding::Width width, bool last);
  void code_alone();
  void add_coded(const Tag& tag, const std::byte* arrived);
  void decode(std::uint32_t chunk);

  struct OnDevice {
    std::uint64_t number = 0;  // of the work
    Peer* from = nullptr;      // none: the copy of all of a lone contributor
    Tag tag{};
  };
  Peer* scatter_from_ = nullptr;  // the contributor before this one
  Peer* scatter_to_ = nullptr;
  std::vector<std::uint32_t> scatter_sends_;
  std::size_t scatter_next_ = 0, scatter_own_ = 0;  // the first `own` come from the input
  std::uint32_t scatter_received_ = 0;
  std::vector<bool> taken_, partial_;  // by chunk: it has arrived to be added to; the output holds a partial sum
  Gather right_, left_;
  std::size_t outstanding_ = 0;
  std::deque<OnDevice> on_device_;
  BucketCoding* coding_ = nullptr;   // none: nothing is coded here
  std::vector<std::uint8_t> forms_;  // by chunk: as it is sent from here
  bool slow_ = false;                // a link from here is
  coding::Width scatter_width_ = coding::Width::plain, final_width_ = coding::Width::plain;
};

// Where members can look into each other's memory: each contributor adds up its segment of all inputs in place, and
// writes the sums to all members.
class PullOperation final : public ChunkedOperation {
 public:
  PullOperation(Communicator& owner, Communicator::Bucket& bucket);
  void start() override;
  void on_ready(Peer& from) override;
  bool on_chunk(Peer& from, const Tag& tag) override;
  void on_write_completed(Peer& to, std::uint32_t kind) override;
  bool has_work() const override;
  void work() override;
  bool done() const override;
  std::optional<Wait> wait() const override;

 private:
  static constexpr std::uint32_t kMostInFlight = 64;  // to each
  struct Sent {                                       // to one member
    std::uint32_t next = 0, in_flight = 0;
  };
  std::optional<std::uint32_t> waits_to_start() const;  // for whom
  bool reduce(const Range& range);
  void pump(std::uint32_t to);

  const std::uint32_t own_chunks_;
  std::uint32_t reduced_ = 0;  // of them
  std::vector<Sent> to_;       // by position
  std::size_t outstanding_ = 0;
};

// Of a bucket whose bytes go in messages and are added by the CPU, also where it is in a GPU's memory: two small copies
// cost less than a ring's hops.
class SmallOperation : public Operation {
 public:
  SmallOperation(Communicator& owner, Communicator::Bucket& bucket) : owner_(owner), bucket_(bucket) {}
  void start() final;
  void on_direct() final;
  void on_reduced(std::uint64_t number) final;
  bool done() const final { return done_; }
  std::optional<std::uint64_t> digest() const final { return digest_; }
  std::optional<Wait> wait() const final;

 protected:
  virtual void begin() = 0;                                    // this member's input is here
  virtual bool go_on() = 0;                                    // whether the result is in out()
  virtual std::optional<std::uint32_t> waits_for() const = 0;  // whose bytes
  bool contributes() const { return owner_.position_ < owner_.contributors_; }
  std::byte* out() const { return owner_.reducer_ ? bucket_.result.data() : bucket_.spec.output.data(); }
  BytesView received(std::uint32_t place) const;  // nothing: it is not here yet
  void send(std::uint32_t position, std::uint32_t place, BytesView bytes);

  Communicator& owner_;
  Communicator::Bucket& bucket_;

 private:
  bool own_here_ = false;  // in the host's memory, if it contributes
  bool done_ = false;
  std::optional<std::uint64_t> digest_;
  std::optional<std::uint64_t> fetching_, storing_;  // of a device: copies under way
};

// Of few members: every contributor sends its input to every member, and each adds all in the same order.
class DirectOperation final : public SmallOperation {
 public:
  using SmallOperation::SmallOperation;

 private:
  void begin() override;
  bool go_on() override;
  std::optional<std::uint32_t> waits_for() const override;
  BytesView input(std::uint32_t contributor) const;  // nothing: it is not here yet
};

// Of many: Doubling.
class DoublingOperation final : public SmallOperation {
 public:
  DoublingOperation(Communicator& owner, Communicator::Bucket& bucket);

 private:
  void begin() override;
  bool go_on() override;
  std::optional<std::uint32_t> waits_for() const override;
  void offer();
  bool hand_on();  // the result, to those beyond

  const Doubling doubling_;
  std::uint32_t place_ = 0;  // whose bytes are added next
  BytesView sum_;            // so far: this member's input, then out()
};

}  // namespace rejoin::ftar
