#include "device/reducer.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/fail.h"

namespace rejoin::device {

using kernels::Mailbox, kernels::Relay, kernels::Work;

namespace {

std::uint64_t acquire(std::uint64_t& flag) { return std::atomic_ref(flag).load(std::memory_order_acquire); }
void release(std::uint64_t& flag, std::uint64_t value) {
  std::atomic_ref(flag).store(value, std::memory_order_release);
}

std::uint64_t address(const std::byte* bytes) { return reinterpret_cast<std::uint64_t>(bytes); }

// What the trainer runs between two buckets needs multiprocessors that no kernel stays on: it would never start where
// all are taken, and the kernel would never leave.
Result<unsigned> blocks_beside_the_trainers(const Device& device, unsigned wanted) {
  constexpr unsigned usual = 8;
  const unsigned there = device.multiprocessors();
  if (wanted == 0) return there == 0 ? usual : std::clamp(there / 4, 1u, usual);
  const unsigned most = std::max(1u, there / 2);
  if (there == 0 || wanted <= most) return wanted;
  return fail(
      ErrorCode::invalid_argument,
      "{} blocks for reductions (--reduce-blocks, REJOIN_REDUCE_BLOCKS) on {} multiprocessors of {}: at most {}, "
      "half of them, so that the trainer's kernels have the others; 0 takes as many as suit it",
      wanted, there, device.name(), most);
}

}  // namespace

Result<std::unique_ptr<Reducer>> Reducer::make(Device& device, const ReducerOptions& wanted) {
  ReducerOptions options = wanted;
  if (wanted.external_launcher) {
    const auto blocks = blocks_beside_the_trainers(device, wanted.blocks);
    if (!blocks) return tl::unexpected(blocks.error());
    options.blocks = *blocks;
  }
  constexpr unsigned most_blocks = 1024;
  if (options.blocks < 1 || options.blocks > most_blocks)
    return fail(ErrorCode::invalid_argument, "{} blocks for reductions: 1 to {} can be", options.blocks, most_blocks);
  if (options.threads < 64 || options.threads > 512 || options.threads % 32 != 0)
    return fail(ErrorCode::invalid_argument, "{} threads a block for reductions: 64 to 512 in steps of 32 can be",
                options.threads);
  if (auto ready = device.prepare_kernels(); !ready) return tl::unexpected(ready.error());
  std::unique_ptr<Reducer> reducer(new Reducer(options));
  auto pinned = device.allocate_pinned(sizeof(Mailbox));
  if (!pinned) return tl::unexpected(pinned.error());
  auto on_device = device.allocate(sizeof(Relay));
  if (!on_device) return tl::unexpected(on_device.error());
  auto stream = device.make_stream();
  if (!stream) return tl::unexpected(stream.error());
  reducer->pinned_ = std::move(*pinned);
  reducer->on_device_ = std::move(*on_device);
  reducer->kernel_ = std::move(*stream);
  reducer->mailbox_ = new (reducer->pinned_.bytes.data()) Mailbox{};
  reducer->relay_ = reinterpret_cast<Relay*>(reducer->on_device_.bytes.data());
  if (auto cleared = reducer->kernel_->clear(reducer->on_device_.bytes.data(), sizeof(Relay)); !cleared)
    return tl::unexpected(cleared.error());
  if (auto loaded = reducer->load(); !loaded) return tl::unexpected(loaded.error());
  return reducer;
}

// A kernel's first launch may wait for the whole device, which later may wait for this kernel. Where launches return
// when their kernels have ended, hold() would never return; one that was held up so long elsewhere is tried again.
Result<> Reducer::load() {
  constexpr int tries = 8;
  constexpr auto patience = std::chrono::milliseconds(20);
  for (int i = 0; i < tries; ++i) {
    if (auto launched = launch(patience); !launched) return launched;
    const bool runs_beside = acquire(mailbox_->left) < launches_;
    leave(launches_);
    if (auto loaded = kernel_->synchronize(); !loaded) return loaded;
    if (runs_beside || !options_.external_launcher) return {};
  }
  return fail(ErrorCode::unavailable,
              "a launch returns here only when its kernel has ended, so that none can run beside the trainer's: unset "
              "CUDA_LAUNCH_BLOCKING, and let no debugger or profiler launch kernels one by one; to find an error, use "
              "compute-sanitizer, or the host's memory (REJOIN_DEVICE=host)");
}

Reducer::~Reducer() {
  if (mailbox_ != nullptr) leave(launches_);
  kernel_.reset();  // waits for it, before its mailbox goes
}

// ---- giving

Result<std::uint64_t> Reducer::add(DataType type, std::byte* out, const std::byte* a, const std::byte* b,
                                   std::size_t count, std::uint32_t divisor) {
  return give({.work = {.out = address(out),
                        .a = address(a),
                        .b = address(b),
                        .count = count,
                        .type = static_cast<std::uint32_t>(type),
                        .divisor = divisor}},
              count * size_of(type));
}

Result<std::uint64_t> Reducer::copy(std::byte* out, const std::byte* in, std::size_t size) {
  return give({.work = {.out = address(out), .a = address(in), .count = size, .type = Work::kCopy}}, size);
}

Result<std::uint64_t> Reducer::code(const coding::Pass& pass, std::shared_ptr<coding::Loss> loss) {
  REJOIN_CHECK(options_.codes && coding::codes(pass.type), "a pass of {} for a kernel that does not code it",
               to_string(pass.type));
  return give({.work = {.count = pass.count, .type = Work::kPass}, .pass = pass, .loss = std::move(loss)},
              pass.count * size_of(pass.type));
}

// Tiles are small enough for all warps to have some, and the larger, the less there is to coordinate.
Result<std::uint64_t> Reducer::give(Given&& given, std::uint64_t bytes) {
  constexpr std::uint64_t page = 4096, most = 32768, for_each = 4;
  const std::uint64_t warps = std::uint64_t{options_.blocks} * options_.threads / 32;
  const std::uint64_t tile =
      std::clamp(bytes / (warps * for_each) / page * page, bytes < 512 * KiB ? page : 2 * page, most);
  Work& work = given.work;
  work.first = tiles_;
  work.tiles = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (bytes + tile - 1) / tile));
  work.tile = static_cast<std::uint32_t>(tile);
  tiles_ += work.tiles;
  waiting_.push_back(std::move(given));
  ++given_;
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  return given_;
}

Result<> Reducer::post_waiting() {
  if (auto failed = failure(); !failed) return failed;
  see_done();
  while (!waiting_.empty() && posted_ - done_ < Mailbox::kWorks) {
    const std::size_t slot = (posted_ + 1) % Mailbox::kWorks;
    Given& next = waiting_.front();
    mailbox_->works[slot] = next.work;
    if (next.work.type == Work::kPass) mailbox_->passes[slot] = next.pass;
    losses_[slot] = std::move(next.loss);
    waiting_.pop_front();
    release(mailbox_->posted, ++posted_);
  }
  // A block that left in the same moment as its work was posted is found by the next done().
  if (options_.external_launcher || posted_ == done_ || a_kernel_takes_it()) return {};
  const std::unique_lock launching(launching_, std::try_to_lock);
  return launching && holds_ == 0 ? launch(options_.patience) : Result<>();
}

Result<std::uint64_t> Reducer::done() {
  if (idle()) return done_;
  see_done();
  if (idle()) return done_;
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  constexpr std::uint64_t between_looks = 256;
  if (options_.external_launcher || ++looks_ % between_looks != 0) return done_;
  const std::unique_lock launching(launching_, std::try_to_lock);
  if (launching && holds_ == 0)
    if (auto looked = look(); !looked) return tl::unexpected(looked.error());
  return done_;
}

// What has been seen is kept: the place of a work that is done is taken by a later one's.
void Reducer::see_done() {
  for (; done_ < posted_; ++done_) {
    const std::size_t slot = (done_ + 1) % Mailbox::kWorks;
    if (acquire(mailbox_->done[slot]) != done_ + 1) return;
    if (const auto loss = std::exchange(losses_[slot], nullptr)) *loss += mailbox_->losses[slot];
  }
}

// A launch that has to leave may take nothing more; the next goes on where it ends.
bool Reducer::a_kernel_takes_it() const {
  const std::uint64_t now = launches_;
  if (holds_ > 0) return true;  // it is there, or about to be
  return acquire(mailbox_->leave) < now && acquire(mailbox_->left) < now;
}

bool Reducer::wants_launch() {
  see_done();
  const bool wants = options_.external_launcher && posted_ > done_ && !a_kernel_takes_it();
  if (wants) wanted_ = true;
  if (wants && call_launcher_) call_launcher_();
  return wants;
}

// The launch is read before the holds, here and in let_go(): a hold that comes between them launches one of its own.
void Reducer::rest() {
  const std::uint64_t now = launches_;
  if (holds_ == 0) leave(now);
}

// ---- launching

// Numbers of launches only grow, whoever tells them to leave.
void Reducer::leave(std::uint64_t launch) {
  std::atomic_ref flag(mailbox_->leave);
  for (std::uint64_t told = flag; told < launch && !flag.compare_exchange_weak(told, launch);) {
  }
}

// Under launching_. Behind whatever is left of the launch before, which has to leave: the stream keeps them in
// order. No event comes behind it: in a queue of the hardware that streams share, what comes behind that would wait for
// the kernel.
Result<> Reducer::launch(Duration patience) {
  const std::uint64_t before = launches_;
  if (auto looked = look(); !looked) return looked;
  const kernels::ReduceArguments arguments{
      .mailbox = mailbox_,
      .relay = relay_,
      .launch = before + 1,
      .patience_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(patience).count())};
  auto launched =
      kernel_->launch(options_.codes ? Kernel::code : Kernel::reduce, {options_.blocks, options_.threads}, &arguments);
  if (!launched) {  // what was given would wait for ever
    const std::lock_guard lock(error_mutex_);
    error_ = launched.error();
    failed_ = true;
    return launched;
  }
  launches_ = before + 1;
  leave(before);
  return {};
}

// Under launching_. A kernel that died says so to its stream alone.
Result<> Reducer::look() {
  const auto idle = kernel_->idle();
  if (idle) return {};
  {
    const std::lock_guard lock(error_mutex_);
    error_ = idle.error();
  }
  failed_ = true;
  return tl::unexpected(idle.error());
}

Result<> Reducer::failure() const {
  if (!failed_) return {};
  const std::lock_guard lock(error_mutex_);
  return tl::unexpected(*error_);
}

// Whether a kernel that is there stays can't be known, since it may be about to leave: the first hold always launches
// one, with no limit to its patience.
Result<> Reducer::hold(Stream* behind) {
  const std::lock_guard launching(launching_);
  if (holds_++ > 0) return {};
  auto launched = behind == nullptr ? Result<>() : kernel_->follow(*behind);
  if (launched) launched = launch(Duration::max());
  if (launched) wanted_ = false;
  else --holds_;
  return launched;
}

void Reducer::let_go() {
  const std::uint64_t now = launches_;
  if (--holds_ == 0) leave(now);
}

Result<> Reducer::launch_if_wanted() {
  const std::lock_guard launching(launching_);
  if (auto looked = look(); !looked || holds_ > 0) return looked;
  return wanted_.exchange(false) ? launch(options_.patience) : Result<>();
}

}  // namespace rejoin::device
