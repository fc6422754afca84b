#include "device/digester.h"

#include <poll.h>

#include <algorithm>
#include <thread>

#include "base/digest.h"
#include "base/fail.h"
#include "device/kernels/xxh3.h"

namespace rejoin::device {

using kernels::DigestArguments, kernels::DigestRange;

namespace {

constexpr int kLooks = 20'000;  // at what does not change, some milliseconds

// A part of a piece that is not its last has a multiple of kDigestRun items.
constexpr std::size_t kMostItems = 32 * kDigestRun, kLeastItems = 4 * kDigestRun;

std::size_t items_of(std::size_t bytes) { return (bytes + kDigestBlock - 1) / kDigestBlock; }

}  // namespace

Result<std::unique_ptr<Digester>> Digester::make(Device& device, Priority priority) {
  auto stream = device.make_stream(priority);
  if (!stream) return tl::unexpected(stream.error());
  return make(device, std::move(*stream));
}

Result<std::unique_ptr<Digester>> Digester::make(Device& device, std::shared_ptr<Stream> stream) {
  if (auto ready = device.prepare_kernels(); !ready) return tl::unexpected(ready.error());
  std::unique_ptr<Digester> digester(new Digester());
  using Table = kernels::xxh3::Keys[kernels::xxh3::kLanes];
  auto keys = device.allocate(sizeof(Table));
  if (!keys) return tl::unexpected(keys.error());
  for (auto& batch : digester->batches_) {
    auto pinned = device.allocate_pinned(kMostItems * sizeof(std::uint64_t) + DigestArguments::kRanges * kDigestBlock);
    if (!pinned) return tl::unexpected(pinned.error());
    batch.pinned = std::move(*pinned);
    batch.arguments.keys = reinterpret_cast<std::uint64_t>(keys->bytes.data());
    batch.arguments.hashes = reinterpret_cast<std::uint64_t>(batch.pinned.bytes.data());
    batch.arguments.tails = batch.arguments.hashes + kMostItems * sizeof(std::uint64_t);
  }
  auto& on_its_way = digester->batches_[0].pinned.bytes;
  auto& table = *reinterpret_cast<Table*>(on_its_way.data());
  for (unsigned lane = 0; lane < kernels::xxh3::kLanes; ++lane) table[lane] = kernels::xxh3::keys_of(lane);
  auto there = stream->copy(keys->bytes.data(), on_its_way.data(), sizeof(Table));
  if (there) there = stream->synchronize();
  if (!there) return tl::unexpected(there.error());
  digester->keys_ = std::move(*keys);
  digester->stream_ = std::move(stream);
  // A kernel's first launch may wait for the whole device, and all others for that.
  const std::span<const std::byte> something[] = {digester->keys_.bytes};
  if (auto loaded = digester->digests(something); !loaded) return tl::unexpected(loaded.error());
  return digester;
}

// Two batches at a time, each of half of what is left, so that little is to be done when the kernel has ended.
Result<std::vector<std::uint64_t>> Digester::digests(std::span<const std::span<const std::byte>> ranges) {
  std::vector<std::uint64_t> digests;
  Rest rest{.ranges = ranges};
  for (const auto& range : ranges) {
    const auto at = reinterpret_cast<std::uint64_t>(range.data());
    if (at % 16 != 0)
      return fail(ErrorCode::invalid_argument, "GPU memory to digest begins at {:#x}, no multiple of 16", at);
    rest.items += items_of(range.size());
    digests.push_back(digest_of_hashes(range.size(), {}));
  }
  std::size_t begun = 0, ended = 0;
  Result<> done;
  while (done && (ended < begun || rest.items > 0)) {
    if (rest.items > 0 && begun - ended < std::size(batches_)) {
      done = start(batches_[begun % std::size(batches_)], rest);
      ++begun;
    } else {
      done = finish(batches_[ended % std::size(batches_)], digests);
      ++ended;
    }
  }
  if (!done) return tl::unexpected(done.error());
  return digests;
}

Result<> Digester::start(Batch& batch, Rest& rest) {
  auto& arguments = batch.arguments;
  arguments.count = arguments.items = 0;
  const std::size_t most = std::clamp(rest.items / 2 / kDigestRun * kDigestRun, kLeastItems, kMostItems);
  while (rest.range < rest.ranges.size() && arguments.count < DigestArguments::kRanges) {
    const auto left = rest.ranges[rest.range].subspan(rest.offset);
    std::size_t items = items_of(left.size());
    if (items > most - arguments.items) items = (most - arguments.items) / kDigestRun * kDigestRun;
    if (items == 0 && !left.empty()) break;
    const std::size_t size = std::min(left.size(), items * kDigestBlock);
    if (items > 0) {
      batch.of[arguments.count] = rest.range;
      arguments.ranges[arguments.count++] = {reinterpret_cast<std::uint64_t>(left.data()), size, arguments.items};
    }
    arguments.items += items;
    rest.items -= items;
    rest.offset = size < left.size() ? rest.offset + size : 0;
    if (rest.offset == 0) ++rest.range;
  }
  constexpr unsigned threads = 256, warps = threads / 32, most_blocks = 2048;
  const Grid grid{static_cast<unsigned>(std::min<std::size_t>((arguments.items + warps - 1) / warps, most_blocks)),
                  threads};
  return stream_->launch(Kernel::digest, grid, &arguments)
      .and_then([&] { return stream_->mark(); })
      .map([&](auto mark) { batch.mark = mark; });
}

Result<> Digester::finish(Batch& batch, std::vector<std::uint64_t>& digests) {
  for (int looks = 0;; ++looks) {
    const auto reached = stream_->reached();
    if (!reached) return tl::unexpected(reached.error());
    if (*reached >= batch.mark) break;
    // A card that its trainer keeps busy takes seconds: no core is spent on that, nor the driver's lock on asking.
    if (looks < kLooks) std::this_thread::yield();
    else (void)::poll(nullptr, 0, 1);
  }
  const auto& arguments = batch.arguments;
  auto* hashes = reinterpret_cast<std::uint64_t*>(batch.pinned.bytes.data());
  const auto* tails = reinterpret_cast<const std::byte*>(hashes + kMostItems);
  for (std::size_t i = 0; i < arguments.count; ++i) {
    const DigestRange& range = arguments.ranges[i];
    const std::span of_it(hashes + range.first, range.items());
    if (const std::size_t rest = range.size % kDigestBlock; rest > 0)
      of_it.back() = digest_of_block({tails + i * kDigestBlock, rest});
    digests[batch.of[i]] = digest_of_hashes(digests[batch.of[i]], of_it);
  }
  return {};
}

}  // namespace rejoin::device
