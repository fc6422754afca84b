#include "device/reducer.h"

#include <algorithm>
#include <atomic>
#include <new>

namespace rejoin::device {

using kernels::Mailbox, kernels::Work;

namespace {

std::uint64_t acquire(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }
void release(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

std::uint64_t address(const std::byte* bytes) { return reinterpret_cast<std::uint64_t>(bytes); }

}  // namespace

Result<std::unique_ptr<Reducer>> Reducer::make(Device& device, const ReducerOptions& options) {
  if (options.blocks < 1 || options.blocks > Mailbox::kMaxBlocks)
    return fail(ErrorCode::invalid_argument, "{} blocks for reductions: 1 to {} can be", options.blocks,
                Mailbox::kMaxBlocks);
  if (options.threads < 32 || options.threads > 512 || options.threads % 32 != 0)
    return fail(ErrorCode::invalid_argument, "{} threads a block for reductions: 32 to 512 in steps of 32 can be",
                options.threads);
  if (auto ready = device.prepare_kernels(); !ready) return tl::unexpected(ready.error());
  std::unique_ptr<Reducer> reducer(new Reducer(options));
  auto pinned = device.allocate_pinned(sizeof(Mailbox));
  if (!pinned) return tl::unexpected(pinned.error());
  for (auto* stream : {&reducer->kernel_, &reducer->copies_}) {
    auto made = device.make_stream();
    if (!made) return tl::unexpected(made.error());
    *stream = std::move(*made);
  }
  reducer->pinned_ = std::move(*pinned);
  reducer->mailbox_ = new (reducer->pinned_.bytes.data()) Mailbox{};
  return reducer;
}

Reducer::~Reducer() {
  rest();
  kernel_.reset();  // waits for it, before its mailbox goes
}

Result<std::uint64_t> Reducer::add(DataType type, std::byte* out, const std::byte* a, const std::byte* b,
                                   std::size_t count, std::uint32_t divisor) {
  waiting_.push_back({.out = address(out),
                      .a = address(a),
                      .b = address(b),
                      .count = count,
                      .type = static_cast<std::uint32_t>(type),
                      .divisor = divisor});
  under_way_.push_back({.number = ++queued_, .work = ++works_});
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  return queued_;
}

Result<std::uint64_t> Reducer::copy(std::byte* out, const std::byte* in, std::size_t size) {
  if (auto copied = copies_->copy(out, in, size); !copied) return tl::unexpected(copied.error());
  const auto mark = copies_->mark();
  if (!mark) return mark;
  under_way_.push_back({.number = ++queued_, .mark = *mark});
  return queued_;
}

Result<> Reducer::post_waiting() {
  const std::uint64_t done = works_done();
  while (!waiting_.empty() && posted_ - done < Mailbox::kWorks) {
    mailbox_->works[(posted_ + 1) % Mailbox::kWorks] = waiting_.front();
    waiting_.pop_front();
    release(mailbox_->posted, ++posted_);
  }
  // A block that left in the same moment as its work was posted is found by done().
  if (posted_ > done && !running_) return launch();
  return {};
}

// Behind whatever is left of the launch before: the stream keeps them in order.
Result<> Reducer::launch() {
  running_ = true;
  if (auto reached = kernel_->reached(); !reached) return tl::unexpected(reached.error());
  const kernels::ReduceArguments arguments{
      .mailbox = mailbox_,
      .launch = ++launches_,
      .patience_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(options_.patience).count())};
  if (auto launched = kernel_->launch(Kernel::reduce, {options_.blocks, options_.threads}, &arguments); !launched)
    return launched;
  const auto mark = kernel_->mark();
  if (!mark) return tl::unexpected(mark.error());
  launch_mark_ = *mark;
  return {};
}

std::uint64_t Reducer::works_done() const {
  std::uint64_t done = posted_;
  for (unsigned b = 0; b < options_.blocks; ++b) done = std::min(done, acquire(mailbox_->blocks[b].done));
  return done;
}

bool Reducer::a_block_left() const {
  for (unsigned b = 0; b < options_.blocks; ++b)
    if (acquire(mailbox_->blocks[b].left) == launches_) return true;
  return false;
}

Result<std::uint64_t> Reducer::done() {
  if (idle()) return done_;
  const std::uint64_t works = works_done();
  const auto copied = copies_->reached();
  if (!copied) return copied;
  while (!under_way_.empty() && under_way_.front().work <= works && under_way_.front().mark <= *copied) {
    done_ = under_way_.front().number;
    under_way_.pop_front();
  }
  if (works == posted_ && waiting_.empty()) return done_;
  if (running_ && a_block_left()) rest();  // the others, too; the next launch goes on where each of them is
  if (auto posted = post_waiting(); !posted) return tl::unexpected(posted.error());
  // A kernel that died says so to its stream alone.
  constexpr std::uint64_t between_looks = 256;
  if (++looks_ % between_looks == 0)
    if (auto reached = kernel_->reached(); !reached) return reached;
  return done_;
}

Result<bool> Reducer::resting() {
  const auto reached = kernel_->reached();
  if (!reached) return tl::unexpected(reached.error());
  return *reached == launch_mark_;
}

void Reducer::rest() {
  if (!running_) return;
  running_ = false;
  release(mailbox_->leave, launches_);
}

}  // namespace rejoin::device
