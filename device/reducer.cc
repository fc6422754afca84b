#include "device/reducer.h"

#include <algorithm>
#include <new>

namespace rejoin::device {

using kernels::Mailbox, kernels::Relay, kernels::Work;

namespace {

std::atomic_ref<std::uint64_t> word(std::uint64_t& of) { return std::atomic_ref(of); }

std::uint64_t address(const std::byte* bytes) { return reinterpret_cast<std::uint64_t>(bytes); }

}  // namespace

Result<std::unique_ptr<Reducer>> Reducer::make(Device& device, const ReducerOptions& options) {
  if (options.blocks < 1 || options.blocks > 1024)
    return fail(ErrorCode::invalid_argument, "{} blocks for reductions: 1 to 1024 can be", options.blocks);
  if (options.threads < 64 || options.threads > 512 || options.threads % 32 != 0)
    return fail(ErrorCode::invalid_argument, "{} threads a block for reductions: 64 to 512 in steps of 32 can be",
                options.threads);
  if (auto ready = device.prepare_kernels(); !ready) return tl::unexpected(ready.error());
  std::unique_ptr<Reducer> reducer(new Reducer(options));
  auto pinned = device.allocate_pinned(sizeof(Mailbox));
  if (!pinned) return tl::unexpected(pinned.error());
  auto memory = device.allocate(sizeof(Relay));
  if (!memory) return tl::unexpected(memory.error());
  auto stream = device.make_stream();
  if (!stream) return tl::unexpected(stream.error());
  reducer->pinned_ = std::move(*pinned);
  reducer->device_ = std::move(*memory);
  reducer->kernel_ = std::move(*stream);
  reducer->mailbox_ = new (reducer->pinned_.bytes.data()) Mailbox{};
  reducer->relay_ = reinterpret_cast<Relay*>(reducer->device_.bytes.data());
  // A launch that leaves at once: the driver may load a kernel only with its first launch, and wait for all streams.
  word(reducer->mailbox_->leave) = 1;
  auto ready = reducer->kernel_->clear(reducer->device_.bytes.data(), reducer->device_.bytes.size());
  if (ready) ready = reducer->launch(Duration::zero());
  if (ready) ready = reducer->kernel_->synchronize();
  if (!ready) return tl::unexpected(ready.error());
  return reducer;
}

Reducer::~Reducer() {
  if (mailbox_ == nullptr) return;
  tell_to_leave(launches_);
  kernel_.reset();  // waits for it, before its mailbox goes
}

Result<std::uint64_t> Reducer::add(DataType type, std::byte* out, const std::byte* a, const std::byte* b,
                                   std::size_t count, std::uint32_t divisor) {
  return give({.out = address(out),
               .a = address(a),
               .b = address(b),
               .count = count,
               .type = static_cast<std::uint32_t>(type),
               .divisor = divisor},
              count * size_of(type));
}

Result<std::uint64_t> Reducer::copy(std::byte* out, const std::byte* in, std::size_t size) {
  return give({.out = address(out), .a = address(in), .count = size, .type = Work::kCopy}, size);
}

// Tiles are small enough for all warps to have some, and the larger, the less is to be said about them.
Result<std::uint64_t> Reducer::give(const Work& asked, std::uint64_t bytes) {
  constexpr std::uint64_t page = 4096, most = 32768, for_each = 4;
  const std::uint64_t warps = std::uint64_t{options_.blocks} * options_.threads / 32;
  const std::uint64_t tile =
      std::clamp(bytes / (warps * for_each) / page * page, bytes < 512 * KiB ? page : 2 * page, most);
  Work work = asked;
  work.first = tiles_;
  work.tiles = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (bytes + tile - 1) / tile));
  work.tile = static_cast<std::uint32_t>(tile);
  tiles_ += work.tiles;
  waiting_.push_back(work);
  ++queued_;
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  return queued_;
}

Result<> Reducer::post_waiting() {
  while (!waiting_.empty() && posted_ - done_ < Mailbox::kWorks) {
    mailbox_->works[(posted_ + 1) % Mailbox::kWorks] = waiting_.front();
    waiting_.pop_front();
    word(mailbox_->posted).store(++posted_, std::memory_order_release);
  }
  return see_to_it();
}

// That there is a kernel for what is posted.
Result<> Reducer::see_to_it() {
  if (failed_) return failure_;
  if (posted_ == done_) return {};
  constexpr std::uint64_t between_looks = 256;
  const bool look = ++looks_ % between_looks == 0;  // a kernel that died says so to its stream alone
  const bool served = is_served();
  if (served && !look) return {};
  if (options_.attended) {
    wanted_ = true;
    return {};
  }
  const std::unique_lock lock(launching_, std::try_to_lock);
  if (!lock || held()) return {};  // somebody launches, or has
  if (auto idle = kernel_->idle(); !idle) return tl::unexpected(idle.error());
  return is_served() ? Result<>() : launch(options_.patience);
}

Result<> Reducer::attend() {
  const std::lock_guard lock(launching_);
  if (failed_) return failure_;
  if (held()) return {};
  const bool wanted = wanted_.exchange(false);
  Result<> well;
  if (auto idle = kernel_->idle(); !idle) well = tl::unexpected(idle.error());
  else if (wanted && !is_served()) well = launch(options_.patience);
  if (!well) {
    failure_ = well;
    failed_ = true;
  }
  return well;
}

bool Reducer::held() const { return holds_ != 0; }

// Whether the last launch will take what is posted: it is not over, nor told to leave.
bool Reducer::is_served() const {
  const std::uint64_t last = launches_;
  return word(mailbox_->left).load(std::memory_order_acquire) < last && word(mailbox_->leave) < last;
}

// Behind whatever is left of the launch before: the stream keeps them in order. No event comes behind it: in a queue of
// the hardware that streams share, what comes behind that would wait for the kernel.
Result<> Reducer::launch(Duration patience) {
  const kernels::ReduceArguments arguments{
      .mailbox = mailbox_,
      .relay = relay_,
      .launch = launches_ + 1,
      .patience_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(patience).count())};
  launches_ = arguments.launch;
  return kernel_->launch(Kernel::reduce, {options_.blocks, options_.threads}, &arguments);
}

Result<std::uint64_t> Reducer::done() {
  if (idle()) return done_;
  while (done_ < posted_ &&
         word(mailbox_->done[(done_ + 1) % Mailbox::kWorks]).load(std::memory_order_acquire) == done_ + 1)
    ++done_;
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  return done_;
}

Result<bool> Reducer::resting() {
  const std::lock_guard lock(launching_);
  return kernel_->idle();
}

void Reducer::rest() {
  const std::uint64_t last = launches_;  // a later one, by hold(), is not meant
  if (!held()) tell_to_leave(last);
}

// The kernel before may be leaving already, so the first hold makes another one in any case, with no limit to its
// patience.
Result<> Reducer::hold(Stream* behind) {
  const std::lock_guard lock(launching_);
  if (failed_) return failure_;
  if (holds_++ > 0) return {};
  tell_to_leave(launches_);
  Result<> launched;
  if (behind != nullptr) launched = kernel_->follow(*behind);
  if (launched) launched = launch(Duration::max());
  if (!launched) --holds_;
  return launched;
}

void Reducer::let_go() {
  const std::uint64_t last = launches_;
  if (--holds_ == 0) tell_to_leave(last);
}

void Reducer::tell_to_leave(std::uint64_t launch) {
  auto leave = word(mailbox_->leave);
  std::uint64_t told = leave;
  while (told < launch && !leave.compare_exchange_weak(told, launch)) continue;
}

}  // namespace rejoin::device
