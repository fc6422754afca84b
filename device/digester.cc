#include "device/digester.h"

#include "base/digest.h"
#include "device/kernels/mailbox.h"
#include "device/kernels/xxh3.h"

namespace rejoin::device {

using kernels::DigestPiece;

Result<std::unique_ptr<Digester>> Digester::make(Device& device) {
  if (auto ready = device.prepare_kernels(); !ready) return tl::unexpected(ready.error());
  std::unique_ptr<Digester> digester(new Digester());
  auto pieces = device.allocate(kPieces * sizeof(DigestPiece));
  if (!pieces) return tl::unexpected(pieces.error());
  auto keys = device.allocate(kernels::xxh3::kLanes * sizeof(kernels::xxh3::Keys));
  if (!keys) return tl::unexpected(keys.error());
  auto pinned =
      device.allocate_pinned(kPieces * (sizeof(DigestPiece) + kDigestBlock) + kBlocks * sizeof(std::uint64_t));
  if (!pinned) return tl::unexpected(pinned.error());
  auto stream = device.make_stream();
  if (!stream) return tl::unexpected(stream.error());
  auto* table = reinterpret_cast<kernels::xxh3::Keys*>(pinned->bytes.data());
  for (unsigned lane = 0; lane < kernels::xxh3::kLanes; ++lane) table[lane] = kernels::xxh3::keys_of(lane);
  auto there = (*stream)->copy(keys->bytes.data(), pinned->bytes.data(), keys->bytes.size());
  if (there) there = (*stream)->synchronize();
  if (!there) return tl::unexpected(there.error());
  digester->pieces_ = std::move(*pieces);
  digester->keys_ = std::move(*keys);
  digester->pinned_ = std::move(*pinned);
  digester->stream_ = std::move(*stream);
  return digester;
}

Result<std::vector<std::uint64_t>> Digester::digests(std::span<const std::span<const std::byte>> pieces) {
  std::vector<std::uint64_t> digests;
  digests.reserve(pieces.size());
  while (!pieces.empty()) {
    std::size_t count = 0, blocks = 0;
    for (; count < std::min(kPieces, pieces.size()); ++count) {
      const std::size_t more = pieces[count].size() / kDigestBlock;
      if (more > kBlocks)
        return fail(ErrorCode::invalid_argument, "a piece of {} to digest at once: {} are the most",
                    human_bytes(pieces[count].size()), human_bytes(kBlocks * kDigestBlock));
      if (blocks + more > kBlocks) break;
      blocks += more;
    }
    if (auto done = batch(pieces.first(count), digests); !done) return tl::unexpected(done.error());
    pieces = pieces.subspan(count);
  }
  return digests;
}

Result<> Digester::batch(std::span<const std::span<const std::byte>> pieces, std::vector<std::uint64_t>& digests) {
  auto* listed = reinterpret_cast<DigestPiece*>(pinned_.bytes.data());
  auto* hashes = reinterpret_cast<std::uint64_t*>(listed + kPieces);
  auto* tails = reinterpret_cast<std::byte*>(hashes + kBlocks);
  std::uint64_t blocks = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto at = reinterpret_cast<std::uint64_t>(pieces[i].data());
    if (at % 16 != 0)
      return fail(ErrorCode::invalid_argument, "GPU memory to digest begins at {:#x}, no multiple of 16", at);
    listed[i] = {at, pieces[i].size(), blocks};
    blocks += pieces[i].size() / kDigestBlock;
  }
  const auto address = [](const void* of) { return reinterpret_cast<std::uint64_t>(of); };
  const kernels::DigestArguments arguments{.keys = address(keys_.bytes.data()),
                                           .pieces = address(pieces_.bytes.data()),
                                           .count = pieces.size(),
                                           .blocks = blocks,
                                           .hashes = address(hashes),
                                           .tails = address(tails)};
  constexpr unsigned threads = 256, warps = threads / 32, most = 2048;
  const auto wanted = (std::max<std::uint64_t>(blocks, pieces.size()) + warps - 1) / warps;
  const Grid grid{static_cast<unsigned>(std::min<std::uint64_t>(wanted, most)), threads};
  auto done = stream_->copy(pieces_.bytes.data(), pinned_.bytes.data(), pieces.size() * sizeof(DigestPiece));
  if (done) done = stream_->launch(Kernel::digest, grid, &arguments);
  if (done) done = stream_->synchronize();
  if (!done) return done;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::size_t whole = pieces[i].size() / kDigestBlock, rest = pieces[i].size() % kDigestBlock;
    std::vector<std::uint64_t> all(hashes + listed[i].first_block, hashes + listed[i].first_block + whole);
    if (rest > 0) all.push_back(digest_of_block({tails + i * kDigestBlock, rest}));
    digests.push_back(digest_of_hashes(pieces[i].size(), all));
  }
  return {};
}

}  // namespace rejoin::device
