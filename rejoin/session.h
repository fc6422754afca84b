// The library that a trainer links. The trainer declares its state and gradients once, then runs steps. Failures of
// other replicas show as nothing but a step that takes a little longer; this replica's own catching up shows as steps
// that do not contribute.
//
//   auto session = *rejoin::Session::open(config);
//   auto w = *session->add({.name = "w", .count = 1000, .moments = 2});
//   session->bucket({w});                                   // gradients that are reduced together
//   session->allocate(); fill(*session->weight(w)); session->join();
//   while (auto step = *session->begin_step()) {
//     if (step->contributes()) {
//       backward(step->batch(), *session->gradient(w));     // writes the gradient
//       session->all_reduce(0);                             // asynchronous; several buckets overlap with backward
//     }
//     session->commit([&](const rejoin::Update& update) { optimizer(update); });
//   }
//   session->leave();
//
// Thread: one trainer thread calls everything here but interrupt() and intact(); a progress thread inside does the
// communication. The library's threads take no signals.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/result.h"
#include "base/types.h"
#include "device/stream_handle.h"
#include "rejoin/position.h"

#pragma GCC visibility push(default)
namespace rejoin {

class CommandLine;

struct SessionConfig {
  std::uint32_t replica = 0, rank = 0;
  std::string socket;                       // the node's daemon; a relative name is taken from where open() is called
  std::string device = "host";              // where state and gradients are: host, cuda:NUMBER or cuda:PCI-ADDRESS
  std::string transport = "shm";            // of the all-reduce: see transport/factory.h; the same on all replicas
  std::string data_listen = "127.0.0.1:0";  // address for data connections, where the transport has addresses
  // The host, or a host for each rail, that other ranks connect to instead of the one listened on, without a port.
  // Empty while data_listen is 0.0.0.0 or [::]: they connect to the node's address as its daemon knows it.
  std::string advertise;
  std::uint64_t chunk_bytes = 1 << 20;            // all-reduce: largest chunk
  std::uint32_t chunks_in_flight = 4;             // … and how many per neighbour
  std::uint64_t gradient_log_budget = 256 << 20;  // bytes of gradients kept while catching up
  // On a GPU a kernel adds while gradients are reduced: so many blocks, of so many threads each. Two of 512 are the
  // least that keep up with 400 Gb/s. Each takes a multiprocessor, and they are half of the GPU's at most; 0: 8, or a
  // quarter of the GPU's where that is less.
  std::uint32_t reduce_blocks = 0, reduce_threads = 512;
  // "auto": on a machine with several NUMA nodes the progress thread runs on that of the GPU, or of the NICs, and
  // staging memory is there; "off": wherever this process runs.
  std::string numa = "auto";
  // Directory for an event file of this process (rN.M.PID.jsonl), for `rejoin trace`; empty: none. A process with
  // several sessions has the file of the last one.
  std::string events;
  // Directory for the flight recording of this process, which is always on and outlives it: "Flight recorder" in
  // docs/operations.md. Empty: the default, "off": none. A process with several sessions has one recording.
  std::string flight;
  // A drill: in this step the library flips one bit of what the all-reduce brings into the host's memory, as if on its
  // way; 0: never.
  std::uint64_t flip_bit_at = 0;
  // Says whether gradients of floats travel with a bounded error: "off", "auto" (where the link is
  // slower than the coder), "8" or "4" (always, in so many bits a value). Each replica may have its own setting: a hop
  // is coded where neither end has "off". All replicas have the same bits in any case. See "Coded gradients" in
  // docs/design-notes.md.
  std::string coding = "off";
  // "auto" codes in 4 bits where a hop then loses no more than this, and in 8 bits otherwise: the root mean square of
  // what it loses, in relation to the values. Above 0, at most 1.
  double coding_error = 0.2;
  // A trainer may evaluate, or write a checkpoint, for so long between commit() and the next begin_step() while the
  // others wait for it. One that takes longer is taken for one that hangs. Session::busy() says more, and elsewhere.
  std::chrono::milliseconds between_steps{std::chrono::minutes(10)};
  // The daemon not being there or not answering for this long is an error of the waiting call; a daemon that restarts,
  // or starts after its trainer, is not. Over a minute, this is also how long each of the first steps may compute.
  std::chrono::milliseconds patience{60000};

  // Called on the trainer's thread about ten times a second while join(), begin_step() or commit() waits, so that a
  // language's own signals are heard meanwhile. It may call interrupt(), and nothing else here.
  std::function<void()> while_waiting;

  // Adds these settings to a program's flags, each also settable as REJOIN_* variable.
  void bind(CommandLine& line);
  // Takes the settings from REJOIN_* variables alone.
  static Result<SessionConfig> from_environment();
  // Checks each setting's form and range, as Session::open() does first. Errors: with the setting, its value and what
  // is allowed.
  Result<> check() const;
};

constexpr std::uint32_t kMostMoments = 7;

struct TensorSpec {
  std::string name;
  DataType type = DataType::float32;
  std::uint64_t count = 0;    // elements
  std::uint32_t moments = 0;  // optimizer moments of the same count: 0 to kMostMoments
  bool elementwise = true;    // the optimizer updates each element from its own gradient and moments alone
  // The type of each moment, where not all have the weight's: say, a float32 master of a bfloat16 weight, and two more.
  std::vector<DataType> moment_types = {};
  // The type of the gradient, where it is not the weight's. The gradient is reduced in it: where the sum over the
  // contributors does not fit (of float16, whose largest number is 65504, that over all but one), the mean is infinite.
  // Reduce float16 in float32. Integers wrap around, and their mean is cut towards zero.
  std::optional<DataType> gradient_type = std::nullopt;
};

struct TensorId {
  std::uint32_t index = 0;
  bool operator==(const TensorId&) const = default;
};
using BucketId = std::uint32_t;

// One application of the optimizer: elements [first, first + count) of a tensor, with the reduced (mean) gradient of
// `step`, of which gradient[0] belongs to element `first`. A contributor gets each tensor once and whole; a catching-up
// replica gets what it has of it, in any number of ranges, and may get several steps for one range, in order. Ranges
// begin at multiples of 64 elements and end at such or with the tensor: where an optimizer's bits depend on where its
// loops begin and end, going through each tensor by slices of a multiple of 64 gives the same ones everywhere. A range
// of a tensor that is not elementwise is all of it. No other element may be changed.
// Bits: all replicas must compute the same, so build the optimizer without -ffast-math and with -ffp-contract=off: GCC
// contracts a multiplication and an addition by default, and does so differently in a loop's vectors and in its rest.
// Thread and lifetime: updates come one after the other, on the thread that called commit(), before it returns.
// `gradient` is memory of the session's device and the session's own, to be read only; it holds these values until the
// optimizer has returned, or, where commit() was given a stream, until the stream has done what the optimizer queued.
// Afterwards it holds others, or is freed: what is to be kept is to be copied. The Update itself is a value.
struct Update {
  TensorId tensor;
  std::uint64_t first = 0, count = 0;
  std::uint64_t step = 0;
  std::span<const std::byte> gradient;
  std::uint32_t contributors = 0;  // how many replicas' gradients are in this mean: those that `step` was decided with
  template <typename T>
  std::span<const T> gradient_as() const {
    return {reinterpret_cast<const T*>(gradient.data()), count};
  }
  // Returns the elements that are to be updated of `column`, which is the whole weight or a whole moment of this
  // tensor.
  template <typename T>
  std::span<T> of(std::span<T> column) const {
    return column.subspan(first, count);
  }
};

class Session {
 public:
  // Makes a session; it does not talk to the daemon yet. Errors: `invalid_argument` for settings that can't work.
  static Result<std::unique_ptr<Session>> open(const SessionConfig& config);
  // Leaves as leave() does, and waits for the daemon's answer only where the state is on a GPU. Nothing is said where
  // the job has finished.
  virtual ~Session() = default;

  // ---- declaring, before allocate(); the same on every replica
  virtual Result<TensorId> add(const TensorSpec& tensor) = 0;
  // Declares a tensor where it lies already: `memory` has the weight and then the moments, as the trainer's framework
  // has allocated them on the session's device, anywhere in its allocations or over several ("expandable segments"),
  // each from a multiple of 16 bytes on. They stay there until the session has gone, and hold what they held. The
  // host's memory can't be shared afterwards: there the session allocates.
  virtual Result<TensorId> add(const TensorSpec& tensor, const std::vector<std::span<std::byte>>& memory) = 0;
  // Every tensor belongs to exactly one bucket; all gradients of a bucket have one type. There may be 3,500 buckets.
  virtual Result<BucketId> bucket(const std::vector<TensorId>& tensors) = 0;
  // Makes a bucket of gradients in the trainer's own memory, one tensor's after the other's in this order: a flat
  // gradient buffer that its framework has allocated on the session's device, anywhere in an allocation or over
  // several; a GPU's from a multiple of an element's size on. The buffer outlives the session, and lies on no other
  // bucket's.
  virtual Result<BucketId> bucket(const std::vector<TensorId>& tensors, std::span<std::byte> gradients) = 0;
  // Says that what a bucket reduces is no gradient, but for example statistics that become their mean: it travels as it
  // is where others are coded (SessionConfig::coding). Nothing may be lost of it, since no later step makes up for
  // that. Errors: `invalid_argument` after allocate(); `not_found`.
  virtual Result<> keep_exact(BucketId bucket) = 0;
  // Allocates the weights, moments (shared with the daemon) and gradients that are not there yet, all zero, in the
  // device's memory: what the next three give are then addresses for its kernels and copies, and no host may look
  // there. Children of fork() have weights and moments in the host's memory in common with the process: that is no
  // snapshot for them, and what they write is written to the state. Copy before the fork. Errors: `invalid_argument`,
  // `exhausted`; `unreachable` for memory that the daemon can't be given, with what to do.
  virtual Result<> allocate() = 0;
  // Errors: `not_found` for a tensor or a moment that was not declared, `invalid_argument` before allocate().
  virtual Result<std::span<std::byte>> weight(TensorId tensor) = 0;
  virtual Result<std::span<std::byte>> moment(TensorId tensor, std::uint32_t index) = 0;
  virtual Result<std::span<std::byte>> gradient(TensorId tensor) = 0;  // write here before all_reduce() of its bucket
  // The caller says, before join() and in up to 4 KiB of text, what else must be the same on all replicas for their
  // bits to be: the framework's version, the optimizer's settings. Who joins with another text is refused and sees
  // both.
  virtual Result<> set_fingerprint(std::string text) = 0;
  // The caller says, before join() and in up to 1 KiB, what trainers of the same rank of other replicas are to know,
  // such as an address. They get it with each step that this rank contributes to.
  Result<> set_card(std::string card) { return set_card(std::move(card), ""); }
  // … with an address of this machine that is listened on for all (0.0.0.0 or [::]): in `listening`, the same text as
  // the card's but for that, it is the last word. There the daemon fills in where others reach this machine, and tells
  // them anew when that changes. Daemons of the release before pass on the card as it is.
  virtual Result<> set_card(std::string card, std::string listening) = 0;
  template <typename T>
  static std::span<T> as(std::span<std::byte> bytes) {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }

  // Registers with the daemon, and waits until the coordinator has taken this rank: the state is initialised, or what
  // initialises it is queued: on a GPU all that this process has queued there is waited for, on any stream. Restored
  // from a checkpoint, it comes with the position that was saved beside it. From here on it may be written to by the
  // daemon, until begin_step() gives a step to contribute to. Errors: `unavailable` (no daemon there), `mismatch`
  // (versions of library and daemon, or the state is not the one that the position was taken with), `refused` (the job
  // says no, and why: it has other sizes, tensors or settings), `timeout` (the daemon does not answer), `cancelled`.
  // Where it fails nothing has been joined, and the caller may try again. In a child of fork() the session does nothing
  // any more: its calls are `invalid_argument`.
  Result<> join() { return join(Position{}); }
  virtual Result<> join(const Position& from) = 0;

  // Says that this trainer multiplies its gradients with Step::weight(). Without it begin_step() is refused by a job in
  // which these are other than 1.
  virtual void use_weights() = 0;

  // ---- steps
  class Step {
   public:
    using Batch = std::vector<SampleRange>;
    struct Card {  // what a contributor's trainer has set with set_card(); empty: nothing
      std::uint32_t replica = 0;
      std::string text;
    };
    struct Facts {
      std::uint64_t number = 0;
      bool contributes = false, leads = false;
      std::uint32_t contributors = 0;
      Batch batch;
      std::uint64_t weight = 1, epoch = 0;
      bool settled = false;
      std::vector<Card> cards;
      std::function<std::vector<Batch>(std::uint32_t steps)> upcoming;
    };
    explicit Step(Facts facts) : facts_(std::move(facts)) {}
    std::uint64_t number() const { return facts_.number; }   // the state is at the version before it
    bool contributes() const { return facts_.contributes; }  // false: catching up; no backward, no all_reduce()
    // True on all ranks of one contributor, which does what one replica does for all, such as writing a checkpoint.
    // Where that one is lost in the step nobody leads it; where processes of protocol 15 are in the job, another may.
    bool leads() const { return facts_.leads; }
    // How many replicas are planned to contribute. Where one is lost in the step fewer are in the mean, and ranks that
    // begin the step later are told fewer: Update::contributors is the number that the step was decided with.
    std::uint32_t contributors() const { return facts_.contributors; }
    const Batch& batch() const { return facts_.batch; }
    // The batches that this replica will have in the next `steps` steps, in order, if no replica comes or goes and
    // shares stay as they are (with `--balance-batches` they may change, but for the next step). The caller may fetch
    // data ahead by it. It is no promise: only batch() says which samples count in a step. Fewer batches, or none, are
    // returned where they are not known, as while catching up.
    std::vector<Batch> upcoming(std::uint32_t steps) const { return facts_.upcoming(steps); }
    // The caller multiplies all gradients of this step with this before all_reduce(). It is 1, or the number of samples
    // in batch(): in a job with `--constant-batch`, and with `--balance-batches` once replicas share by speed. There
    // replicas may have different numbers of samples, and the result is the mean over all samples if each hands over
    // the mean over its own times this. (The sum over its own is that.)
    std::uint64_t weight() const { return facts_.weight; }
    // These three serve connections of the trainers' own among those that contribute. The epoch is the one in which
    // this step began here; later ones have larger numbers. Settled means that all members begin the step in this
    // epoch, so that all have cards of the same ones; otherwise somebody has been lost in this step, and the next one
    // will do.
    std::uint64_t epoch() const { return facts_.epoch; }
    bool settled() const { return facts_.settled; }
    const std::vector<Card>& cards() const { return facts_.cards; }

   private:
    Facts facts_;
  };
  // Waits until there is a step for this replica. Nothing: the job is finished. A replica that has come too late to
  // have a part in it gets nothing, too, and has the state that it came with: version() tells. Errors of this and the
  // next two: `cancelled` (interrupt() was called, or this replica was declared lost and is out: end the process, start
  // it again and it catches up), `refused`, `timeout`; `invalid_argument` for a call that is not due, which changes
  // nothing: begin_step() in a step that commit() has not ended, all_reduce() and commit() outside of one.
  virtual Result<std::optional<Step>> begin_step() = 0;
  // Starts reducing a bucket: its gradients are written. They must not change before commit() returns. Each bucket is
  // due once in a step that this replica contributes to. Errors: besides, `invalid_argument` for a bucket that is not
  // there, has been handed over already, or is caught up with.
  virtual Result<> all_reduce(BucketId bucket) = 0;
  // Reduces a bucket in GPU memory whose gradients will be written when the stream comes to this point. What is queued
  // on the stream afterwards waits until the bucket has been reduced; this thread waits for nothing. If the session
  // fails or ends, its streams go on.
  virtual Result<> all_reduce(BucketId bucket, CudaStream stream) = 0;
  // Waits until the step is committed (through as many retries as it takes, from the same gradients), then calls
  // `optimizer` for all updates and publishes the new version. Where a joiner that has caught up has to take the
  // step over, for nobody else is left or answers, it calls nothing, and begin_step() gives the same step once more, to
  // contribute to; perhaps on some ranks of the replica only, those that had begun it.
  // The optimizer has done its work when it returns; the other commit() is for one that only queues it.
  // Errors: besides, `invalid_argument` for a step to contribute to of which buckets have not been handed over: they
  // are named, nothing has happened, and commit() may follow when they have been. What the optimizer throws is an error
  // `cancelled` here with its text: the state is updated in part, so that it is nobody's any more; this replica is out
  // and its peers go on, all later calls say the same, and the process is to end, and to be started again.
  virtual Result<> commit(const std::function<void(const Update&)>& optimizer) = 0;
  // As commit() above, for an optimizer that only queues its work on `stream`. The session publishes the new version
  // when the stream has done what is queued on it now. This call waits for the step's decision, and not for the stream.
  virtual Result<> commit(const std::function<void(const Update&)>& optimizer, CudaStream stream) = 0;
  // Called in each commit() whose step is decided, before the optimizer's updates, on contributors and joiners alike:
  // reduced() has all gradients of this step then. What the optimizer needs of the gradient as a whole, such as its
  // norm, is computed here and kept by the step's number, since a joiner gets updates of the steps before, too.
  virtual void when_reduced(std::function<void(std::uint64_t step)> look) = 0;
  // Returns the whole reduced gradient of a tensor, in the device's memory. It is valid from when_reduced()'s call, or
  // from begin_update(), until the next begin_step().
  virtual Result<std::span<const std::byte>> reduced(TensorId tensor) const = 0;

  // commit() in two halves, for trainers that can't be called back, or whose optimizer takes all tensors at once. The
  // first waits for the step's decision and gives the updates, in the order in which they are to be applied: they hold
  // until the second, which publishes the new version. Between the two reduced() has the step's gradients, and no
  // other call is due. Nothing, where begin_step() gives the same step once more: there is no second half then.
  // Errors: as of commit(). when_reduced() is not called.
  virtual Result<std::optional<std::vector<Update>>> begin_update() = 0;
  virtual Result<> end_update() = 0;
  virtual Result<> end_update(CudaStream stream) = 0;  // … when the stream has done what is queued on it now
  // Call this instead of end_update() if the optimizer has failed; `what` says how. The state is updated in part, so
  // that it is nobody's any more. Returns the error that all later calls give, too: `cancelled`.
  virtual Error abandon_update(const std::string& what) = 0;

  // Says by which factor a step's mean gradient was multiplied in its update, for what coding has lost of it. That is
  // added to the next step's gradients with the weight
  //
  //   min(factor / usual, clamp(factor, 1, 2)), where `usual` is the median of the last 15 factors above 0 that were
  //   told of steps before (1 each at first): what the next step's is expected to be
  //
  // and with the weight 1 where nothing is said. The factor is
  //  - where the gradient is clipped, the coefficient of the clip;
  //  - where the step is skipped, 0;
  //  - where the loss has a scale, times the next step's scale over this step's: in units of the next step's gradients.
  // Neither Step::weight() nor the learning rate is part of it. It is the same on all replicas, and told in each step
  // or in none. Due after commit(), or end_update(), of `step` and before the first all_reduce() of the next one;
  // however often that is retried, it counts once. Of another step, later, while catching up, or where nothing is coded
  // it changes nothing. Thread: the trainer's. Errors: `invalid_argument` for a factor that is negative or not finite,
  // before join() and inside of an optimizer; those of begin_step() where the session is at its end.
  virtual Result<> scale_feedback(std::uint64_t step, float factor) = 0;

  // Tells the job that this trainer is busy until done(), so that it is not put out for being waited for: with a
  // checkpoint, an evaluation, a compilation, which the others could take for hanging. Anywhere: between steps, in a
  // step before commit(), or over any of these calls. For up to `limit` the others wait; the coordinator's status says
  // who is busy with what and for how long. Who is busy for longer is treated as one that hangs, and everybody's log
  // says so. How long such a step took does not count for what is taken for hanging later. Before join() nobody waits,
  // and the time begins with it.
  // Errors of both: `cancelled` and the like where the session is at its end; done() ends the busy time even where it
  // returns such an error. `invalid_argument` for a limit that is not 1 ms to a week, a reason that is not 1 to 200
  // bytes, busy() twice, done() without busy().
  virtual Result<> busy(std::chrono::milliseconds limit, std::string_view reason) = 0;
  // The same for what each step does, such as reading its data, and may take long with now and then. Its time counts as
  // computing, and how long steps take is learned from it; the others hear of it when it takes longer than usual.
  virtual Result<> busy_in_step(std::chrono::milliseconds limit, std::string_view reason) = 0;
  virtual Result<> done() = 0;

  // ---- looking
  // Returns the version that all of the state has, where it is complete: a checkpoint is of that version. It returns
  // nothing before the first step, and while this replica catches up, when its weights are of several versions. After a
  // commit() with a stream it is the version that work queued on that stream afterwards sees.
  virtual std::optional<std::uint64_t> version() const = 0;
  // Returns the last step that commit() has ended here, contributing or catching up, for schedules and logs; of a
  // replica that came to a finished job with the state of its last step, that step. Otherwise it says nothing of the
  // state.
  virtual std::uint64_t committed() const = 0;
  // For trainers with connections of their own to the step's other contributors (Step::cards()): waits for up to
  // `during`, and returns true if all of these are still in the step then. False: one of them may be lost, or begin the
  // step late and unsettled, so what waits on such a connection may wait in vain. End it, and use none of them before
  // the next step.
  // While the step under way is not decided, any new epoch makes this false; afterwards one that lacks a contributor of
  // the step does, and so does the session's end. Thread: any, from when join() has returned without an error, while
  // the session lives.
  virtual bool intact(std::chrono::milliseconds during) = 0;
  // Says whether this replica is still in the job, by the error that begin_step() or commit() would return now, if they
  // are due. A trainer calls it while it waits for something else within a step or an update, such as another rank.
  virtual Result<> check() const = 0;
  // Returns where the job stands with the state as it is. A checkpoint is this rank's weights, its moments, and this.
  // The call reads all of the state, for its digest. Errors: `unavailable` before the first step, while the replica
  // catches up, and within commit(), when the state is of no one step; where an update has broken off that one's,
  // which is `cancelled`, or the device's.
  virtual Result<Position> position() const = 0;
  // Returns the digest of weights and moments, which is equal on all replicas at the same version. It waits for the
  // last commit's stream, and before join() for all that this process has queued on the GPU. Errors: of the device;
  // `invalid_argument` before allocate().
  virtual Result<std::uint64_t> state_digest() const = 0;

  // ---- ending
  // Ends this replica's part in the job: the others go on at once, and hear that it has left. When this returns ok its
  // daemon knows, and has ended what came into the state of a replica that was catching up; only a daemon that can't
  // for half of the job's silence answers before. Where a session ends otherwise, no such thing is said, and the state
  // is nobody's. All later calls but version(), committed(), position(), state_digest() and those that give memory are
  // refused with `cancelled`; calling it again, after a failure or before join() tells nobody anything. Errors:
  // `unavailable` where the daemon is away, `timeout` where this process has stood still: the others go on when the
  // process has ended; `timeout`, too, where a GPU is not done with copies into the state, which is then to be left
  // alone until the session has gone; `invalid_argument` within an optimizer.
  virtual Result<> leave() = 0;
  // Has join(), begin_step() and commit() return with `cancelled` if they wait, and these and all_reduce() from then
  // on. The caller calls leave() next. Thread: any, and a signal's handler (async-signal-safe), while the session
  // lives.
  virtual void interrupt() noexcept = 0;
};

}  // namespace rejoin

#pragma GCC visibility pop
