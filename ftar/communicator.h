// One rank's part in its ring: connections to the same rank of the other replicas, epochs, and the all-reduces that
// run under them. It owns no thread: whoever owns the engine calls it, and everything happens inside its calls.
//
// Fault tolerance, in short (see "All-reduce under failures" in docs/design-notes.md):
//  - Out of place: the input is only read, so that a broken all-reduce starts again from it in the next epoch.
//  - enter() ends everything of the epoch before. Each member waits until its own writes have landed or failed, tells
//    those so (`flushed`) to which it has written or will, and starts again only when all who have written to it, or
//    will, have: after that no byte of an older epoch can land here. Endpoints of members that are gone are closed
//    (fenced) before.
//  - Every chunk and message names its epoch, step, bucket and chunk; what does not fit is dropped and counted.
//  - Members are connected with all others, or in a large ring with those whom they need, and with spares
//    (base/ring_links.h), so that an epoch without some of them needs no new connection.
//
// The messages between two members, in order (operation.h): a hello when they connect, an introduction with the keys of
// their memory; in each epoch `flushed`; for each bucket of each step `ready`, then chunks (writes) and credits for
// them (where members look into each other's memory, chunks of sums alone), or for a small bucket `direct` parts of
// what each contributes, or of sums; `surplus` where they need no connection any more; behind the introduction `coding`
// of whoever takes coded chunks.
//
// connections.cc: connections. communicator.cc: epochs. flush.cc: what comes between two of them. messages.cc: what is
// sent and comes in. ring.cc, pull.cc and direct.cc: the algorithms; coded_ring.cc: chunks that travel coded.
// results.cc: digests.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/ring_links.h"
#include "base/types.h"
#include "device/reducer.h"
#include "ftar/coder.h"
#include "ftar/coding.h"
#include "ftar/results.h"
#include "ftar/schedule.h"
#include "transport/transport.h"

namespace rejoin::ftar {

struct Member {
  ReplicaId replica;
  Incarnation incarnation;
  auto operator<=>(const Member&) const = default;
};

enum class Role : std::uint8_t { contributor, catching_up };

struct RingMember {
  Member member;
  Role role = Role::contributor;
};

// How members cut buckets into chunks, all of an epoch alike: as they do now, or as releases of protocol 15 do.
enum class Chunking : std::uint8_t { now, of_protocol_15 };

// A buffer that is reduced as one operation. The same on every member, in the same order.
// The spans stay mapped while the communicator lives; both have count × size_of(type) bytes, of the memory of
// Options::device.
struct BucketSpec {
  DataType type = DataType::float32;
  std::size_t count = 0;  // elements
  std::span<std::byte> input;
  std::span<std::byte> output;
  bool exact = false;  // this member codes none of its chunks, and decodes what others code
};

struct Options {
  // S: no chunk is larger. In the host's memory it is half a MiB at most where members send each other chunks: then
  // what has come is added while it is in a core's cache.
  std::size_t chunk_bytes = 1 * MiB;
  std::uint32_t chunks_in_flight = 4;  // C: per bucket, neighbour and direction; at most 64
  // Buckets up to this size skip the ring. Of a device's memory larger ones, since each hop of a ring costs more there.
  std::size_t direct_bytes = 32 * KiB;
  std::size_t device_direct_bytes = 256 * KiB;
  // Up to this many members everyone sends to everyone; more exchange sums in log2 as many rounds (Doubling).
  std::uint32_t direct_members = 8;
  Step flip_bit_at;  // for a drill: the first bytes that arrive in this step are damaged; 0: never
  // The GPU whose memory all buckets are in; none: the host's. The engine must take such memory. All members must have
  // GPUs, or none.
  std::shared_ptr<device::Device> device;
  device::ReducerOptions reducer;                   // how the GPU's reducer is made
  std::shared_ptr<device::Reducer> shared_reducer;  // a reducer that is there already, to be used instead
  // Says how this member's chunks of floats travel: coded with a bounded error where that pays, or not. Each member may
  // have its own setting; a hop is coded where neither end has it off. A shared reducer must be one that codes.
  Coding coding = Coding::off;
  double coding_error = 0.2;  // automatic: the root mean square of what is lost at a hop, in relation to the values

  // What only tests and measurements have otherwise:
  std::size_t direct_memory = 256 * MiB;  // all that is kept for small buckets takes no more; the smallest come first
  bool both_ways = true;                  // all-gather in both directions at once
  bool pull = true;  // where all members can look into each other's memory, they do (PullOperation), unless chunks must
                     // be coded
  double coding_rate = 0;  // automatic: bytes a second that the CPU, or the GPU, codes; 0: measured
};

// Says whether all options are within their bounds.
Result<> check(const Options& options);

struct Outcome {
  enum class Kind : std::uint8_t {
    done,       // an all-reduce ended: `bucket`, `step`; its result is in the bucket's output on every member
    entered,    // the epoch of the last enter() is clean, operations run: `epoch`
    peer_up,    // a connection is ready for use: `member`
    peer_lost,  // a connection ended: `member`, `error`; the owner decides what follows
    peer_left,  // a connection ended since both had found it to be surplus: `member`. It may be needed again by now
    failed,     // this member's device has failed: `error`; nothing goes on here
  };
  Kind kind{};
  std::uint32_t bucket = 0;
  Step step;
  Epoch epoch;
  Member member;
  std::optional<Error> error;
};

// What the communicator waits for, named so that a person can act on it.
struct Wait {
  std::uint32_t bucket = 0;
  Step step;
  std::optional<Member> on;  // nobody: on this rank's own trainer
  std::string what;          // "chunk 17 of 64 of the reduce-scatter"
  bool on_trainers = false;  // on an operation: some member's trainer may just be computing
  bool to_land = false;      // on writes of this rank from before the epoch
  bool unconnected = false;  // on a connection with that member, which does not come about
  Duration since{};          // how long there has been no progress
};

struct PeerStats {
  Member member;
  std::uint64_t chunks_received = 0, bytes_received = 0;
  Duration longest_gap{};        // between two chunks of one all-reduce: a slow hop shows here
  Duration recent_gap{};         // the longest of the last 10 to 20 s
  std::uint32_t coded_bits = 0;  // of a value in the last chunk that was sent to it; 0: it went as it is
};

struct Stats {
  std::uint64_t stale_dropped = 0;  // notifications and messages of other epochs or operations
  std::uint64_t operations_done = 0;
  std::uint64_t bytes_reduced = 0;
  std::uint64_t kernel_launches = 0;   // on this member's GPU; for tests
  std::uint64_t chunk_bytes_sent = 0;  // as they travel
  std::uint64_t plain_bytes_sent = 0;  // the same chunks, as they would travel if none were coded: whole blocks
  std::uint64_t coded_chunks_sent = 0;
  std::uint64_t feedback_bytes = 0;    // memory that keeps what coding has lost
  std::optional<double> coding_error;  // as BucketCoding's, of the bucket where it is largest; none: nothing was coded
  std::vector<PeerStats> peers;
};

class ChunkedOperation;
class RingOperation;
class PullOperation;
class SmallOperation;
class DirectOperation;
class DoublingOperation;
class Operation;
struct Peer;

// The group whose members reduce with each other: the same rank of all replicas of a job.
struct Group {
  std::uint64_t job = 0;
  std::uint32_t rank = 0;
  LinkRule links;
};

constexpr std::size_t kMaxBuckets = 3500;  // their region keys fit one message

class Communicator {
 public:
  // Registers staging and buckets with the engine, which must outlive this, and loads the device's kernels. That may
  // take seconds: the system pins the memory. Whoever must not be silent for so long calls it before anybody listens.
  // The buckets' sizes and types must be equal on all members, which compare them when they connect.
  static Result<std::unique_ptr<Communicator>> prepare(transport::Engine& engine, const Options& options,
                                                       std::vector<BucketSpec> buckets);
  // The caller says who this member is as soon as it knows, and calls nothing else before. Peers of another `group` are
  // refused.
  void join(Member self, Group group);
  // Prepares and joins at once.
  static Result<std::unique_ptr<Communicator>> make(transport::Engine& engine, const Options& options, Member self,
                                                    std::vector<BucketSpec> buckets, Group group);
  ~Communicator();

  // Starts connecting to a peer, which ends in peer_up or peer_lost. Of two members the one with the larger incarnation
  // connects; where both do, its connection stays.
  Result<> connect(Member peer, const transport::Address& address);
  // Connections that have not come up in so long end in peer_lost: whoever was to answer may have been another process.
  void drop_unfinished(Duration patience, TimePoint now);
  // To be called again and again while something is waited for. Connections that are needed, and on which the peer's
  // machine has acknowledged nothing for so long of what is on its way there, end in peer_lost: what lies between may
  // have forgotten them. The first of several calls only looks.
  void drop_unanswered(Duration patience, TimePoint now);
  // Closes (fences) the connection; nothing of the peer lands any more.
  void forget(Member peer);
  bool connected(Member peer) const;
  std::optional<Duration> round_trip(Member peer) const;  // see transport::Engine
  // Returns for this epoch's neighbours the best rate of our writes to each since the last call, in bytes a second,
  // where any were of some size.
  std::vector<std::pair<Member, double>> take_link_rates();
  // The peer is at this address from now on: a call of this member's to another one, which has not come up, is given
  // up, so that connect() calls it here. Connections that are up stay.
  void on_address(Member peer, const transport::Address& address);
  bool knows(Member peer) const { return peers_.contains(peer); }  // connected, or on the way
  std::size_t connecting() const;                                  // connections of its own that are on the way
  bool needs(Member peer) const;                                   // in this epoch the two send each other something
  std::size_t missing() const;                                     // those it needs that it is not connected with
  std::vector<Member> peers() const;                               // that it knows
  std::vector<Member> links() const;  // with whom this member is to be connected in this epoch

  // Begins an epoch: `ring` in the order agreed by all, with this member in it. Operations under way are dropped;
  // the owner starts them again. Who was in the ring before and is not in this one may go on writing, if it has not
  // heard of this epoch: it is forgotten. Epochs only grow.
  void enter(Epoch epoch, std::vector<RingMember> ring, Chunking chunking = Chunking::now);
  Epoch epoch() const { return epoch_; }
  bool clean() const { return clean_; }  // operations run

  // Says whether the all-reduces that are started from now on digest their results, for results(): every chunk while it
  // is in the cache; on a GPU when results() are asked for.
  void digest_results(bool on) { digesting_ = on; }
  void flip_bit_at(Step step) { options_.flip_bit_at = step; }  // see Options
  Results results() const;
  Origins origins() const;  // of all-reduces of this epoch

  // Starts an all-reduce of a bucket, at most one at a time for each bucket. Refused before the first enter().
  // A mean divides the sum by `weights`, which is below 2³¹ and the same on all members; 0: by how many contribute.
  // Each contribution has then been multiplied with its weight already, and the weights add up to that. (A single
  // contributor's bytes are halved sums of them with themselves: twice a value must fit the type.)
  Result<> all_reduce(std::uint32_t bucket, Step step, ReduceOp op, std::uint64_t weights = 0);

  // What coding has lost in this step counts `factor` times as much in the next (Feedback::scale()). It comes when the
  // step's all-reduces have ended, before the first one of the next step.
  void scale_feedback(Step step, float factor);

  // Sets the time at which what is started before the next poll() starts.
  void notice(TimePoint now) { now_ = std::max(now_, now); }
  // Drives everything. The outcomes are valid until the next call.
  std::span<const Outcome> poll(TimePoint now);
  bool busy() const;  // operations or a flush are under way, which are worth spinning for
  // There is something to add up, or this member's GPU adds up. Nothing that poll() then waits for wakes the caller, so
  // it must not sleep.
  bool working() const;

  std::vector<Wait> waits(TimePoint now) const;
  // This process was paused for so long, until now: what it did not see in that time does not count as missing.
  void forgive(Duration pause, TimePoint now) { last_progress_ = std::min(now, last_progress_ + pause); }
  Stats stats() const;

 private:
  friend class ChunkedOperation;
  friend class RingOperation;
  friend class PullOperation;
  friend class SmallOperation;
  friend class DirectOperation;
  friend class DoublingOperation;
  struct Bucket;

  Communicator(transport::Engine& engine, const Options& options);
  void handle(const transport::Event& event);
  void on_accepted(const transport::Event& event);
  void on_message(Peer& peer, BytesView message);
  void on_written(Peer& peer, const transport::Event& event);
  void on_completed(const transport::Event& event);
  void introduce(Peer& peer);
  void on_introduction(Peer& peer, std::uint64_t abilities, BytesView rest);
  void lose(Peer& peer, Error error);
  void remove(Peer& peer);
  void refresh(Peer& peer);
  void choose_direct();
  Result<> reserve_direct();
  bool on_direct_part(Peer& peer, Bucket& bucket, Step step, BytesView message);  // false: it does not belong here
  void poll_reducer();
  void fail_device(const Error& error);
  Result<> flush();
  bool reduced_on_device(const Result<std::uint64_t>& work);
  std::vector<std::uint32_t> partners() const;
  void place(Peer& peer);
  bool owes_flush(const Peer& peer) const;
  bool tell_flush(Peer& peer);
  void on_flushed(Peer& peer, Epoch epoch);
  void on_surplus(Peer& peer, Epoch epoch);
  void offer_surplus(Peer& peer);
  void try_flush();
  std::vector<Wait> flush_waits(Duration since) const;
  void begin(Bucket& bucket);
  void finish(Bucket& bucket);
  Result<> reserve_coding();
  bool offer_coding(Peer& peer);  // false: it is lost
  void on_coding(Peer& peer, std::uint64_t layout, BytesView rest);
  bool codes_to(Peer* peer, const Bucket& bucket);
  void adapt_coding(Bucket& bucket);
  Result<> send(Peer& peer, std::uint32_t kind, std::uint32_t bucket, std::uint64_t value, BytesView body = {});
  bool post(Peer& peer, std::uint32_t bucket, std::uint32_t kind, const transport::LocalRange& local,
            const transport::RemoteRange& remote, std::size_t length, std::uint32_t slot, std::uint32_t chunk,
            std::uint32_t form);
  Peer* peer_of(transport::EndpointId endpoint);
  Peer* peer_of(Member member);
  std::uint64_t plan_hash() const;
  bool damage_if_due(Step step, std::span<std::byte> arrived);  // returns whether it was
  bool device_works() const { return done_by_device_ < given_to_device_; }
  bool works_by_itself() const { return pulls_ || contributors_ == 1; }
  void work();
  bool may_pull() const;
  bool pulled(const Bucket& bucket) const;
  bool direct(const Bucket& bucket) const;
  bool doubled(const Bucket& bucket) const;
  Doubling doubling() const;
  std::uint32_t places(const Bucket& bucket) const;
  Shape shape_of(const Bucket& bucket) const;
  std::size_t chunk_bytes(const Bucket& bucket) const;
  std::vector<BytesView> ranges_of(const Bucket& bucket) const;
  BytesView received(const Bucket& bucket, std::uint32_t place) const;  // empty until all of it has arrived

  transport::Engine& engine_;
  Options options_;
  Member self_;
  Group group_;
  std::vector<Bucket> buckets_;
  device::Memory staging_;
  device::Memory direct_room_;  // pinned, for small buckets of a device
  // Peers' bytes that can't be read in place are copied to a room: so much of each of two peers at a time.
  static constexpr std::size_t kPullRoom = 64 * KiB;
  Bytes pull_room_;
  bool pulls_ = false;  // peers can look at this member's inputs
  transport::RegionId staging_region_;
  device::Memory coded_room_;  // for the coded chunks of all buckets that may travel so
  transport::RegionId coded_region_;
  std::shared_ptr<device::Reducer> reducer_;                // null where buckets are in the host's memory
  std::unique_ptr<Coder> coder_;                            // the reducer's, or the CPU's
  double coding_rate_ = 0;                                  // bytes a second that it codes
  std::uint64_t given_to_device_ = 0, done_by_device_ = 0;  // numbers of its last works
  bool flushes_ = false;                                    // NICs' writes are flushed before the device reads them
  bool digesting_ = false;
  Chunking chunking_ = Chunking::now;
  bool device_failed_ = false;
  std::map<Member, std::unique_ptr<Peer>> peers_;
  std::map<transport::EndpointId, Peer*> by_endpoint_;

  Epoch epoch_;
  bool clean_ = false;      // this epoch's flush is complete
  bool announced_ = false;  // our own `flushed` is out
  bool was_clean_ = false;  // clean, or has been in this epoch before a connection broke
  std::vector<RingMember> ring_;
  std::map<Member, std::uint32_t> positions_;  // in it
  std::vector<Peer*> ring_peers_;              // same order; null for this member, and where there is no connection
  std::vector<std::uint32_t> partners_;  // positions, ascending, of those that this member exchanges anything with
  std::vector<std::uint32_t> links_;     // positions of those with whom it is to be connected
  std::uint32_t position_ = 0, contributors_ = 0;

  TimePoint now_{};
  TimePoint last_progress_{};
  std::vector<Outcome> outcomes_, handed_out_;
  std::uint64_t stale_dropped_ = 0, operations_done_ = 0, bytes_reduced_ = 0;
  std::uint64_t chunk_bytes_sent_ = 0, plain_bytes_sent_ = 0, coded_chunks_sent_ = 0;
  std::uint64_t strangers_ = 0, misdirected_ = 0;  // connections that were refused
};

}  // namespace rejoin::ftar
