// The inside of a communicator: its peers, its buckets, and the operations that reduce a bucket. Everything here runs
// on the communicator's thread.
#pragma once

#include <deque>

#include "base/recent_longest.h"
#include "ftar/coded.h"
#include "ftar/communicator.h"
#include "ftar/link_rate.h"
#include "ftar/schedule.h"

namespace rejoin::ftar {

// What a write's notification carries. Epoch and step wrap, and so tell apart only what is near in time. That is
// enough, since the flush of enter() lets nothing older through.
struct Tag {
  std::uint32_t epoch, step, bucket, kind, slot, chunk, form = kPlain;
  static constexpr std::uint32_t kReduceScatter = 0, kAllGather = 1;
  // How the chunk is coded. `kPlainAfterSlow`: it is plain, and its bytes have come over a slow link before, so whoever
  // makes the result of it codes that. Members send other forms than `kPlain` only to those that take coded chunks.
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
constexpr std::uint64_t kPulls = 1;  // it lets others read its inputs in place, and reads theirs

// Messages between members: this header, then the kind's body. Where members pull, the body of `ready` says where the
// sender's input lies (ViewableRegion). docs/glossary.md says who sends which, and when.
struct MessageHeader {
  enum Kind : std::uint32_t { introduction = 1, flushed, ready, credit, direct, surplus, coding };
  static constexpr std::uint64_t kCodingLayout = 1;  // the version of the layout of coded chunks and of their room
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
  bool called = false;  // this member has opened the connection
  std::string address;  // … to there
  TimePoint since{};    // when it began to open it
  transport::RemoteRegion staging;
  std::vector<transport::RemoteRegion> outputs;  // by bucket
  bool pulls = false;
  std::vector<transport::ViewableRegion> inputs;      // by bucket, from its `ready` on, if it pulls
  std::optional<transport::RemoteRegion> coded_room;  // where coded chunks go; nothing: it takes none
  LinkRate rate;                                      // how fast our writes to it are
  bool slow = false;                                  // they are so slow that chunks are coded
  std::uint32_t position = 0;                         // in this epoch's ring, or its size where it is not in it
  bool partner = false;                               // in this epoch the two send each other something
  bool surplus = false;                               // in this epoch both are members that need no connection
  Epoch offered, heard_surplus;          // the last epoch in which this member, or the peer, has sent `surplus`
  Epoch flushed;                         // the last epoch before which all of its writes are over
  Epoch met;                             // the last epoch in which it may have written here
  Epoch flush_sent;                      // the last of our own flushes that it has been sent
  std::size_t writes_in_flight = 0;      // how many of our writes to it are in flight
  std::vector<std::uint8_t> free_slots;  // slots of its staging that we may write to
  std::vector<std::uint64_t> ready;      // by bucket: the step it has started, plus one
  PeerStats stats;
  TimePoint last_chunk{};
  RecentLongest gaps;                         // between chunks of one all-reduce
  std::optional<std::uint64_t> acknowledged;  // of what is on its way there, when it was last looked at
  Duration unanswered{};                      // for how long it has been that
  TimePoint looked_at{};

  bool fenced() const { return met == Epoch{} || flushed > met; }  // none of its writes of older epochs can land
};

// One all-reduce of one bucket in one epoch. The communicator creates it when the reduction starts, calls it for each
// event, and destroys it when it is done or the epoch ends.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual void start() = 0;
  virtual void on_ready(Peer&) {}
  virtual void on_credit() {}
  // Returns false for a chunk that does not belong here.
  virtual bool on_chunk(Peer&, const Tag&, const std::optional<transport::Digested>&) { return false; }
  virtual void on_write_completed(Peer&, std::uint32_t /*kind*/) {}
  virtual void on_direct() {}
  virtual void on_reduced(std::uint64_t /*number*/) {}  // the device has done its works up to this number
  virtual bool has_work() const { return false; }       // there is something to do that no event announces
  virtual void work() {}                                // does some of that
  virtual bool done() const = 0;
  // Returns the digest of the result, once done; nothing where none was wanted or the result is in a device's memory.
  virtual std::optional<std::uint64_t> digest() const = 0;
  virtual std::optional<Wait> wait() const = 0;
};

struct Communicator::Bucket {
  BucketSpec spec;
  std::uint32_t index = 0;
  transport::RegionId input, output;
  transport::ViewableRegion viewable;  // the input; its length is 0 where nobody can read it in place
  std::unique_ptr<Operation> running;
  bool wanted = false;  // its reduction was asked for and is not done in this epoch yet
  Step step;
  std::uint32_t divisor = 0;  // what the sum is divided by for a mean
  // What arrives for a small bucket, by step parity (a peer can be one step ahead, never two), then by place.
  struct Inbox {
    Step step;
    Bytes data;
    std::vector<std::size_t> arrived;  // bytes, by place
  };
  Inbox inbox[2];
  bool small = false;           // it goes in messages and not around the ring
  std::size_t chunk_bytes = 0;  // of the last all-reduce that has begun
  bool pulled = false;          // likewise
  // For the flight recorder, of the all-reduce under way: when something arrived last, the longest time without
  // anything, who ended that, and how much has arrived.
  TimePoint came_at{};
  Duration longest_gap{};
  ReplicaId longest_from;
  std::uint32_t came = 0;
  std::vector<std::uint64_t> offered;    // digests of the sums that this member sent in Doubling's rounds, by place
  std::optional<std::uint64_t> digest;   // the digest of the last result
  std::unique_ptr<BucketCoding> coding;  // null: its chunks are never coded
  // Pinned room for this member's own input and for the result, of a small bucket in a device's memory.
  std::span<std::byte> own, result;

  std::size_t bytes() const { return spec.count * size_of(spec.type); }
  void on_came(const Peer& from, TimePoint now) {
    ++came;
    const Duration gap = now - std::exchange(came_at, now);
    if (gap <= longest_gap) return;
    longest_gap = gap;
    longest_from = from.member.replica;
  }
  // Returns what this member contributes, in the host's memory.
  BytesView contribution() const { return own.empty() ? BytesView(spec.input) : BytesView(own); }
  // Makes the result of what a single contributor has, in the host's memory; also of a part of it.
  void take(BytesView alone, std::byte* out) const;
};

// An operation whose bucket goes in chunks. Each chunk becomes final once.
class ChunkedOperation : public Operation {
 public:
  ChunkedOperation(Communicator& owner, Communicator::Bucket& bucket);
  std::optional<std::uint64_t> digest() const final;

 protected:
  bool peer_ready(const Peer& peer) const;
  void make_final(std::uint32_t chunk);
  // Returns whether it is as it arrived, and no drill has damaged it.
  bool take_final(Peer& from, std::uint32_t chunk, std::span<std::byte> arrived);
  void take_digest(std::uint32_t chunk, const std::optional<transport::Digested>& known = std::nullopt);

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
  bool on_chunk(Peer& from, const Tag& tag, const std::optional<transport::Digested>& digested) override;
  void on_write_completed(Peer& to, std::uint32_t kind) override;
  void on_reduced(std::uint64_t number) override;
  bool has_work() const override;
  void work() override;
  bool done() const override {
    return final_count_ == chunks_ && outstanding_ == 0 && all_sent() && on_device_.empty();
  }
  std::optional<Wait> wait() const override;
  static coding::Width width_of(std::uint32_t form);  // of a tag

 private:
  // One direction of the all-gather.
  struct Gather {
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
  std::size_t length_of(std::uint32_t chunk, std::uint32_t form) const;  // bytes that travel
  std::byte* coded_place(std::uint32_t chunk) const;
  Source source_of(std::uint32_t chunk, bool own, bool takes_coded) const;
  bool own_is_coded();
  void code_own(std::uint32_t chunk);
  Result<std::uint64_t> combine(std::uint32_t chunk, const std::byte* arrived, std::uint32_t form, coding::Width width,
                                bool last);
  void code_alone(std::uint32_t chunk);
  Result<std::uint64_t> add_coded(const Tag& tag, const std::byte* arrived);
  void decode(std::uint32_t chunk);

  // What the coder works on, and what is to be done when it has: with all of a lone contributor, a hop, a chunk of this
  // member's own to be sent, one of a lone contributor's that is final then, or one that is decoded.
  struct GivenWork {
    enum class Of : std::uint8_t { all, hop, own, alone, decoded, nothing_more };
    Of of = Of::all;
    std::uint32_t chunk = 0;
    Peer* from = nullptr;  // of a hop
    Tag tag{};
    std::uint64_t number = 0;
    static GivenWork hop(Peer& from, const Tag& tag) { return {Of::hop, tag.chunk, &from, tag}; }
    static GivenWork own(std::uint32_t chunk) { return {.of = Of::own, .chunk = chunk}; }
    static GivenWork alone(std::uint32_t chunk) { return {.of = Of::alone, .chunk = chunk}; }
    static GivenWork decoded(std::uint32_t chunk) { return {.of = Of::decoded, .chunk = chunk}; }
    static GivenWork nothing_more() { return {.of = Of::nothing_more}; }
  };
  // ring.cc
  void give(const Result<std::uint64_t>& number, GivenWork work);
  void on_done(const GivenWork& work);
  const bool alone_;               // this member is the only contributor
  std::uint32_t taken_alone_ = 0;  // … and how many chunks of its input it has taken
  Peer* scatter_from_ = nullptr;   // the contributor before this one
  Peer* scatter_to_ = nullptr;
  std::vector<std::uint32_t> scatter_sends_;
  std::size_t scatter_next_ = 0, scatter_own_ = 0;  // the first `own` come from the input
  std::uint32_t scatter_received_ = 0;
  std::size_t scatter_given_ = 0, scatter_coded_ = 0;  // of those, where chunks are coded: to the coder; by it
  std::vector<bool> taken_, partial_;  // by chunk: it has arrived to be added to; the output holds a partial sum
  Gather right_, left_;
  std::size_t outstanding_ = 0;
  std::deque<GivenWork> on_device_;
  BucketCoding* coding_ = nullptr;   // null: nothing is coded here
  std::vector<std::uint8_t> forms_;  // by chunk: the form in which it is sent from here
  std::vector<bool> decoding_;       // by chunk: the output does not hold yet what has come of it
  bool slow_ = false;                // a link from here is slow
  coding::Width scatter_width_ = coding::Width::plain, final_width_ = coding::Width::plain;
};

// An operation among members that can read each other's memory: each contributor adds up its segment of all inputs
// where they lie, and writes the sums to all members.
class PullOperation final : public ChunkedOperation {
 public:
  PullOperation(Communicator& owner, Communicator::Bucket& bucket);
  void start() override;
  void on_ready(Peer& from) override;
  bool on_chunk(Peer& from, const Tag& tag, const std::optional<transport::Digested>& digested) override;
  void on_write_completed(Peer& to, std::uint32_t kind) override;
  bool has_work() const override;
  void work() override;
  bool done() const override;
  std::optional<Wait> wait() const override;

 private:
  static constexpr std::uint32_t kMostInFlight = 64;  // chunks to each member
  // How far the chunks to one member have come.
  struct Sent {
    std::uint32_t next = 0, in_flight = 0;
  };
  std::optional<std::uint32_t> waits_to_start() const;  // returns the position of whom it waits for
  bool reduce(const Range& range);
  void pump(std::uint32_t to);

  const std::uint32_t own_chunks_;
  std::uint32_t reduced_ = 0;  // how many of them have been added up
  std::vector<Sent> to_;       // by the receiver's position
  std::size_t outstanding_ = 0;
};

// An operation whose bytes go in messages and are added by the CPU, also where the bucket is in a GPU's memory: two
// small copies cost less than a ring's hops.
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
  virtual void begin() = 0;  // is called when this member's input is in the host's memory
  virtual bool go_on() = 0;  // adds what has arrived; returns whether the result is in out()
  virtual std::optional<std::uint32_t> waits_for() const = 0;  // returns the position of whose bytes are missing
  bool contributes() const { return owner_.position_ < owner_.contributors_; }
  std::byte* out() const { return owner_.reducer_ ? bucket_.result.data() : bucket_.spec.output.data(); }
  BytesView received(std::uint32_t place) const;  // empty until all of it has arrived
  void send(std::uint32_t position, std::uint32_t place, BytesView bytes);

  Communicator& owner_;
  Communicator::Bucket& bucket_;

 private:
  bool own_here_ = false;  // this member's input is in the host's memory, or it contributes none
  bool done_ = false;
  std::optional<std::uint64_t> digest_;
  std::optional<std::uint64_t> fetching_, storing_;  // copies from and to a device that are under way
};

// The operation of few members: every contributor sends its input to every member, and each adds all in the same order.
class DirectOperation final : public SmallOperation {
 public:
  using SmallOperation::SmallOperation;

 private:
  void begin() override;
  bool go_on() override;
  std::optional<std::uint32_t> waits_for() const override;
  BytesView input(std::uint32_t contributor) const;  // empty until all of it is here
};

// The operation of many members: recursive doubling, in the rounds of `Doubling` (schedule.h).
class DoublingOperation final : public SmallOperation {
 public:
  DoublingOperation(Communicator& owner, Communicator::Bucket& bucket);

 private:
  void begin() override;
  bool go_on() override;
  std::optional<std::uint32_t> waits_for() const override;
  void offer();
  bool hand_on();  // sends the result to the members beyond a power of two

  const Doubling doubling_;
  std::uint32_t place_ = 0;  // the place whose bytes are added next
  BytesView sum_;            // the sum so far: first this member's input, then out()
};

}  // namespace rejoin::ftar
