#include "rejoin/stream_flags.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <new>

namespace rejoin {

namespace {
constexpr std::size_t kPage = 64;  // pairs that are made at a time
}  // namespace

struct alignas(128) StreamFlags::Flags::Pair {
  std::uint64_t ready = 0;              // the stream's
  std::uint64_t number = 0;             // of who has it, or had it last
  alignas(64) std::uint64_t ended = 0;  // the CPU's, which a stream looks at all the time
};

struct StreamFlags::Inside {
  explicit Inside(std::shared_ptr<device::Device> of) : device(std::move(of)) {}
  const std::shared_ptr<device::Device> device;
  std::mutex mutex;  // guards what follows; no call of the driver is made under it
  std::list<Flags::Pair*> free;
  std::list<device::Memory> pages;
};

Result<> StreamFlags::Flags::queue_ready(device::Stream& stream) const { return stream.write(&pair->ready, number); }

Result<> StreamFlags::Flags::queue_wait_for_end(device::Stream& stream) const {
  return stream.wait_until(&pair->ended, number);
}

bool StreamFlags::Flags::ready() const {
  return std::atomic_ref(pair->ready).load(std::memory_order_acquire) >= number;
}

void StreamFlags::Flags::end() const { std::atomic_ref(pair->ended).store(number, std::memory_order_release); }

StreamFlags::StreamFlags(std::shared_ptr<device::Device> device)
    : inside_(std::make_unique<Inside>(std::move(device))) {}

Result<StreamFlags*> StreamFlags::of(const std::shared_ptr<device::Device>& device) {
  if (auto can = device->has_stream_flags(); !can) return tl::unexpected(can.error());
  static std::mutex& mutex = *new std::mutex;
  static auto& all = *new std::map<std::string, std::unique_ptr<StreamFlags>>;
  const std::lock_guard lock(mutex);
  auto& flags = all[device->address()];
  if (!flags) flags.reset(new StreamFlags(device));
  return flags.get();
}

Result<StreamFlags::Flags> StreamFlags::take() {
  for (;;) {
    {
      const std::lock_guard lock(inside_->mutex);
      auto& free = inside_->free;
      const auto found = std::ranges::find_if(free, [](Flags::Pair* one) { return Flags{one, one->number}.ready(); });
      if (found != free.end()) {
        Flags::Pair* const pair = *found;
        free.erase(found);
        return Flags{pair, ++pair->number};
      }
    }
    auto page = inside_->device->allocate_pinned(kPage * sizeof(Flags::Pair));
    if (!page) return tl::unexpected(page.error());
    const std::lock_guard lock(inside_->mutex);
    for (std::size_t i = 0; i < kPage; ++i)
      inside_->free.push_back(new (page->bytes.data() + i * sizeof(Flags::Pair)) Flags::Pair);
    inside_->pages.push_back(std::move(*page));
  }
}

void StreamFlags::give_back(const Flags& flags) {
  const std::lock_guard lock(inside_->mutex);
  inside_->free.push_back(flags.pair);
}

}  // namespace rejoin
