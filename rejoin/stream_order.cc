#include "rejoin/stream_order.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <thread>

#include "base/clock.h"
#include "base/fail.h"
#include "base/log.h"

namespace rejoin {

namespace {

constexpr std::uint64_t kEver = std::numeric_limits<std::int64_t>::max();
constexpr Duration kPatience = std::chrono::seconds(10);  // with streams that are let go of, and still don't go

std::uint64_t acquire(std::uint64_t& flag) { return std::atomic_ref(flag).load(std::memory_order_acquire); }

}  // namespace

struct alignas(64) StreamOrder::Flags {
  std::uint64_t ready = 0, past = 0;      // the stream's
  alignas(64) std::uint64_t reduced = 0;  // the CPU's, which the stream looks at all the time
};

StreamOrder::Flags& StreamOrder::flags(std::size_t which) const {
  return reinterpret_cast<Flags*>(memory_.bytes.data())[which];
}

Result<std::unique_ptr<StreamOrder>> StreamOrder::make(std::shared_ptr<device::Device> device,
                                                       std::shared_ptr<device::Reducer> reducer, std::size_t buckets,
                                                       std::function<void()> wake) {
  if (auto can = device->has_stream_flags(); !can) return tl::unexpected(can.error());
  auto memory = device->allocate_pinned((buckets + 1) * sizeof(Flags));
  if (!memory) return tl::unexpected(memory.error());
  std::unique_ptr<StreamOrder> order(new StreamOrder(std::move(device), std::move(reducer), buckets, std::move(wake)));
  order->memory_ = std::move(*memory);
  for (std::size_t i = 0; i <= buckets; ++i) new (&order->flags(i)) Flags;
  return order;
}

StreamOrder::~StreamOrder() {
  release();
  // The streams themselves may be gone, and can't be asked. Somebody else may hold one up for good: then the flags
  // stay.
  const SteadyClock clock;
  const TimePoint deadline = clock.now() + kPatience;
  for (std::size_t b = 0; b < handed_over_.size(); ++b)
    while (acquire(flags(b).past) < handed_over_[b]) {
      if (clock.now() > deadline) {
        logger().warn(
            "a CUDA stream is held up by something else before it has gone on from bucket {}: the {} that it "
            "looks at are never freed",
            b, human_bytes(memory_.bytes.size()));
        new device::Memory(std::move(memory_));
        return;
      }
      std::this_thread::yield();
    }
}

Result<device::Stream*> StreamOrder::adopted(CudaStream handle) {
  auto& stream = streams_[handle];
  if (!stream) {
    auto made = device_->adopt_stream(handle);
    if (!made) return tl::unexpected(made.error());
    stream = std::move(*made);
  }
  if (auto reached = stream->reached(); !reached) return tl::unexpected(reached.error());
  return stream.get();
}

Result<> StreamOrder::takes(CudaStream handle) {
  const auto stream = adopted(handle);
  return stream ? (*stream)->takes_work() : tl::unexpected(stream.error());
}

void StreamOrder::await(const Reached& what) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = waiting_.empty();
    waiting_.push_back(what);
  }
  if (first) wake_();
}

// That the bucket is ready is queued first. So whatever another thread of the trainer's makes the driver wait for
// between these calls, a kernel that is held has a flag behind it that the progress thread will see, and is let go of.
//
// The kernel comes behind the first bucket of a step, so that it takes nothing from what is queued before. Later it is
// wanted at once: what was reduced already may have to be once more, in another epoch.
Result<> StreamOrder::hand_over(std::uint32_t bucket, std::uint64_t step, CudaStream handle) {
  const auto stream = adopted(handle);
  if (!stream) return tl::unexpected(stream.error());
  const bool first = std::exchange(last_step_, step) != step;
  if (released()) return fail(ErrorCode::cancelled, "bucket {} comes after the session's end", bucket);
  Flags& flag = flags(bucket);
  auto queued = (*stream)->write(&flag.ready, step);
  if (!queued) return queued;
  await({.bucket = bucket, .step = step});
  if (auto held = hold(bucket, step, first ? *stream : nullptr); !held) return held;
  queued = (*stream)->wait_until(&flag.reduced, step);
  if (queued) queued = (*stream)->write(&flag.past, step);
  if (queued) handed_over_[bucket] = step;
  return queued;
}

// Until on_reduced(), which may have come already.
Result<> StreamOrder::hold(std::uint32_t bucket, std::uint64_t step, device::Stream* behind) {
  if (auto held = reducer_->hold(behind); !held) return held;
  const std::lock_guard lock(mutex_);
  if (acquire(flags(bucket).reduced) >= step) reducer_->let_go();
  else held_[bucket] = step;
  return {};
}

Result<> StreamOrder::updated(std::uint64_t step, bool contributed, CudaStream handle) {
  const auto stream = adopted(handle);
  if (!stream) return tl::unexpected(stream.error());
  if (auto takes = (*stream)->takes_work(); !takes) return takes;
  if (auto queued = (*stream)->write(&flags(held_.size()).ready, step); !queued) return queued;
  await({.step = step, .contributed = contributed});
  return {};
}

bool StreamOrder::released() const {
  const std::lock_guard lock(mutex_);
  return released_;
}

std::vector<StreamOrder::Reached> StreamOrder::poll() {
  const std::lock_guard lock(mutex_);
  std::vector<Reached> reached;
  std::erase_if(waiting_, [&](const Reached& what) {
    if (acquire(flags(what.bucket.value_or(held_.size())).ready) < what.step) return false;
    reached.push_back(what);
    return true;
  });
  return reached;
}

bool StreamOrder::waits_for_streams() const {
  const std::lock_guard lock(mutex_);
  return !waiting_.empty();
}

bool StreamOrder::streams_wait() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(held_.begin(), held_.end(), [](std::uint64_t step) { return step != 0; });
}

void StreamOrder::on_reduced(std::uint32_t bucket, std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  if (released_) return;
  std::atomic_ref(flags(bucket).reduced).store(step, std::memory_order_release);
  if (held_[bucket] == 0 || held_[bucket] > step) return;
  held_[bucket] = 0;
  reducer_->let_go();
}

void StreamOrder::release() {
  const std::lock_guard lock(mutex_);
  released_ = true;
  for (std::size_t b = 0; b < held_.size(); ++b) {
    std::atomic_ref(flags(b).reduced).store(kEver, std::memory_order_release);
    if (std::exchange(held_[b], 0) != 0) reducer_->let_go();
  }
}

}  // namespace rejoin
