#include "rejoin/stream_order.h"

#include <atomic>
#include <limits>

namespace rejoin {

namespace {

std::atomic_ref<std::uint64_t> word(const device::Memory& memory, std::uint32_t bucket) {
  return std::atomic_ref(reinterpret_cast<std::uint64_t*>(memory.bytes.data())[bucket]);
}

}  // namespace

Result<std::unique_ptr<StreamOrder>> StreamOrder::make(std::shared_ptr<device::Device> device, std::size_t buckets,
                                                       const Fd& wake) {
  auto reduced = device->allocate_pinned(buckets * sizeof(std::uint64_t));
  if (!reduced) return tl::unexpected(reduced.error());
  auto side = device->make_stream(), waits = device->make_stream();
  if (!side) return tl::unexpected(side.error());
  if (!waits) return tl::unexpected(waits.error());
  std::unique_ptr<StreamOrder> order(new StreamOrder(std::move(device), wake));
  order->reduced_ = std::move(*reduced);
  order->side_ = std::move(*side);
  order->waits_ = std::move(*waits);
  for (std::uint32_t b = 0; b < buckets; ++b) word(order->reduced_, b).store(0);
  return order;
}

StreamOrder::~StreamOrder() {
  release();
  waits_.reset();  // until it is done; the trainer's own streams may have gone before
}

Result<device::Stream*> StreamOrder::adopted(void* handle) {
  auto& stream = streams_[handle];
  if (!stream) {
    auto made = device_->adopt_stream(handle);
    if (!made) return tl::unexpected(made.error());
    stream = std::move(*made);
  }
  if (auto reached = stream->reached(); !reached) return tl::unexpected(reached.error());
  return stream.get();
}

Result<> StreamOrder::await(Reached what, void* handle) {
  const auto stream = adopted(handle);
  if (!stream) return tl::unexpected(stream.error());
  const std::lock_guard lock(mutex_);
  if (auto follows = side_->follow(**stream); !follows) return follows;
  const auto mark = side_->mark();
  if (!mark) return tl::unexpected(mark.error());
  waiting_.push_back({*mark, what});
  return side_->signal(wake_);
}

Result<> StreamOrder::hand_over(std::uint32_t bucket, std::uint64_t step, void* handle) {
  if (auto awaited = await({.bucket = bucket, .step = step}, handle); !awaited) return awaited;
  const auto* words = reinterpret_cast<const std::uint64_t*>(reduced_.bytes.data());
  auto& stream = *streams_.at(handle);
  return stream.wait_until(words + bucket, step).and_then([&] { return waits_->follow(stream); });
}

Result<> StreamOrder::updated(std::uint64_t step, bool contributed, void* handle) {
  return await({.step = step, .contributed = contributed}, handle);
}

Result<std::vector<StreamOrder::Reached>> StreamOrder::poll() {
  const std::lock_guard lock(mutex_);
  std::vector<Reached> reached;
  if (waiting_.empty()) return reached;
  const auto mark = side_->reached();
  if (!mark) return tl::unexpected(mark.error());
  for (; !waiting_.empty() && waiting_.front().mark <= *mark; waiting_.pop_front())
    reached.push_back(waiting_.front().what);
  return reached;
}

void StreamOrder::on_reduced(std::uint32_t bucket, std::uint64_t step) { word(reduced_, bucket).store(step); }

void StreamOrder::release() {
  const auto buckets = static_cast<std::uint32_t>(reduced_.bytes.size() / sizeof(std::uint64_t));
  for (std::uint32_t b = 0; b < buckets; ++b) word(reduced_, b).store(std::numeric_limits<std::int64_t>::max());
}

}  // namespace rejoin
