#include "local/offer.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "base/fail.h"
#include "local/page.h"

namespace rejoin::local {

namespace {

using device::Handle;

constexpr std::size_t kMaxDescription = 64 * MiB;

void serialise(const SharedMemory& memory, Bytes& to) {
  put(to, memory.skipped);
  put(to, static_cast<std::uint8_t>(memory.dma_buf.has_value()));
  if (memory.dma_buf) put(to, memory.dma_buf->offset);
  put(to, static_cast<std::uint32_t>(memory.handles.size()));
  for (const auto& handle : memory.handles) {
    put(to, handle.kind);
    put(to, handle.size);
    if (handle.kind == Handle::Kind::address) put(to, handle.address);
  }
}

// `needed`: bytes that it must have behind what is skipped.
Result<SharedMemory> parse(BytesView& bytes, std::uint64_t needed) {
  const auto bad = [] { return fail(ErrorCode::corrupt, "the handles of the state can't be read"); };
  SharedMemory memory;
  std::uint32_t count = 0;
  std::uint8_t exported = 0;
  if (!take(bytes, memory.skipped) || !take(bytes, exported) || exported > 1) return bad();
  if (exported != 0 && !take(bytes, memory.dma_buf.emplace().offset)) return bad();
  if (!take(bytes, count) || count > kMaxOffered) return bad();
  std::uint64_t all = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    Handle& handle = memory.handles.emplace_back();
    if (!take(bytes, handle.kind) || handle.kind > Handle::Kind::address || !take(bytes, handle.size)) return bad();
    if (handle.kind == Handle::Kind::address && !take(bytes, handle.address)) return bad();
    constexpr std::uint64_t most = std::uint64_t{1} << 46;
    if (handle.size > most || (all += handle.size) > most) return bad();
  }
  if (!in_range(memory.skipped, needed, all))
    return fail(ErrorCode::corrupt, "{} of the state in memory of {}", human_bytes(needed), human_bytes(all));
  return memory;
}

template <typename What>
void for_descriptors(Offer& offer, What what) {
  what(offer.page);
  what(offer.doorbell);
  const auto of = [&](SharedMemory& memory) {
    for (auto& handle : memory.handles)
      if (handle.kind == Handle::Kind::descriptor) what(handle.fd);
    if (memory.dma_buf) what(memory.dma_buf->fd);
  };
  of(offer.shadow);
  for (auto& memory_range : offer.memory_ranges) of(memory_range);
}

}  // namespace

Bytes describe(const Offer& offer) {
  const Bytes manifest = offer.manifest.serialise();
  Bytes bytes = joined(static_cast<std::uint32_t>(manifest.size()), manifest);
  offer.layout.serialise(bytes);
  serialise(offer.shadow, bytes);
  for (const auto& memory_range : offer.memory_ranges) serialise(memory_range, bytes);
  return bytes;
}

Result<Offer> parse_description(BytesView bytes) {
  std::uint32_t length = 0;
  if (!take(bytes, length) || length > bytes.size()) return fail(ErrorCode::corrupt, "the state can't be read of");
  auto manifest = Manifest::parse(bytes.first(length));
  if (!manifest) return tl::unexpected(manifest.error());
  bytes = bytes.subspan(length);
  auto layout = Layout::parse(*manifest, bytes);
  if (!layout) return tl::unexpected(layout.error());
  Offer offer{.manifest = std::move(*manifest), .layout = std::move(*layout)};
  auto shadow = parse(bytes, shadow_bytes());
  if (!shadow) return tl::unexpected(shadow.error());
  offer.shadow = std::move(*shadow);
  for (const auto size : offer.layout.memory_ranges()) {
    auto memory_range = parse(bytes, size);
    if (!memory_range) return tl::unexpected(memory_range.error());
    offer.memory_ranges.push_back(std::move(*memory_range));
  }
  if (!bytes.empty()) return fail(ErrorCode::corrupt, "{} bytes behind the state's handles", bytes.size());
  return offer;
}

void make_room_for_messages(const Fd& socket) {
  constexpr int size = 2 * kMaxMessage;
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

Result<std::vector<Fd>> pack(Offer offer) {
  const Bytes bytes = describe(offer);
  if (bytes.size() > kMaxDescription)
    return fail(ErrorCode::invalid_argument, "the state takes {} to describe, the limit is {}",
                human_bytes(bytes.size()), human_bytes(kMaxDescription));
  auto file = make_sealed_memfd("rejoin-state", bytes.size());
  if (!file) return tl::unexpected(file.error());
  auto mapped = Mapping::of(*file, bytes.size());
  if (!mapped) return tl::unexpected(mapped.error());
  std::copy(bytes.begin(), bytes.end(), mapped->data());
  std::vector<Fd> fds;
  fds.push_back(std::move(*file));
  for_descriptors(offer, [&](Fd& fd) { fds.push_back(std::move(fd)); });
  if (fds.size() > kMaxOffered)
    return fail(ErrorCode::invalid_argument, "the state lies in {} allocations, the limit is {}", fds.size(),
                kMaxOffered);
  return fds;
}

Result<Offer> unpack(std::vector<Fd> descriptors) {
  if (descriptors.empty()) return fail(ErrorCode::corrupt, "no descriptors of a state");
  const auto size = sealed_size(descriptors[0]);
  if (!size) return tl::unexpected(size.error());
  if (*size > kMaxDescription) return fail(ErrorCode::corrupt, "a description of {}", human_bytes(*size));
  Bytes bytes(*size);  // a copy: its sender may write into the file meanwhile
  if (::pread(descriptors[0].get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return fail_errno("reading the description of a state");
  auto offer = parse_description(bytes);
  if (!offer) return offer;
  std::size_t next = 1;
  for_descriptors(*offer, [&](Fd& fd) {
    if (next < descriptors.size()) fd = std::move(descriptors[next]);
    ++next;
  });
  if (next != descriptors.size())
    return fail(ErrorCode::corrupt, "{} descriptors came with a state that has {}", descriptors.size(), next);
  return offer;
}

}  // namespace rejoin::local
