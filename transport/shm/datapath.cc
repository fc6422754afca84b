// Records out and in.
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/digest.h"
#include "base/fail.h"
#include "base/streamed_copy.h"
#include "transport/shm/engine.h"

namespace rejoin::transport::shm {

namespace {

constexpr std::uint64_t kInline = 8 * KiB;   // smaller writes travel in the ring: cheaper than a system call
constexpr std::uint32_t kSocketEvery = 256;  // polls between two looks at the sockets while busy
constexpr std::size_t kRecordsPerTurn = 32;  // of one endpoint in a poll()
// A poll() ends when it has moved this much: whoever is told of the bytes then finds them in the cache.
constexpr std::uint64_t kBytesPerPoll = 256 * KiB;
// Of one record no more is moved at a time, so that none holds up the others.
constexpr std::uint64_t kBytesPerTurn = 4 * MiB;
constexpr auto kNumberStays = std::chrono::milliseconds(1);  // a process's, behind its end
constexpr std::size_t kPeerFiles = 512;                      // of one peer, mapped at a time

// Older receivers take it for a part of has_notify.
std::uint16_t copy_flags(const Write& write) {
  if (!write.streamed || !write.notify) return 0;
  return write.digested ? wire::kStreamed | wire::kDigested : wire::kStreamed;
}

}  // namespace

std::span<const Event> ShmEngine::poll() {
  if (std::exchange(slept_, false)) {
    for (auto* endpoint : open_) endpoint->in.announce_sleep(false);
    watch_sockets();
  } else if (++polls_ % kSocketEvery == 0 || open_.empty()) {
    watch_sockets();
  }
  moved_ = 0;
  std::size_t next = first_ + 1;  // nobody is always last
  const std::size_t count = open_.size();
  for (std::size_t i = 0; i < count && !open_.empty(); ++i) {
    const std::size_t at = (first_ + i) % open_.size();
    Endpoint& endpoint = *open_[at];  // a failing one leaves the list, and nobody is lost
    if (!endpoint.pending.empty()) flush(endpoint);
    const bool has_turn = moved_ < kBytesPerPoll;
    bool more = true;
    for (std::size_t taken = 0; taken < kRecordsPerTurn && moved_ < kBytesPerPoll && more; ++taken)
      more = receive(endpoint);
    if (has_turn && moved_ >= kBytesPerPoll) next = at + 1;  // those behind it come first then
    if (!more && endpoint.hung_up) fail_endpoint(endpoint, endpoint.hung_up->code, endpoint.hung_up->message);
  }
  first_ = next;
  return events_.take();
}

// ---- out

void ShmEngine::post(Endpoint& endpoint, const wire::Header& header, BytesView body) {
  if (!endpoint.pending.empty() || !endpoint.out.append(bytes_of(header), body)) {
    const bool asked = header.kind == wire::Kind::write || header.kind == wire::Kind::read;
    endpoint.pending.push_back({header, Bytes(body.begin(), body.end()), asked ? 0 : sizeof(Pending) + body.size()});
    endpoint.unsent.add(endpoint.pending.back().counted);
    return;
  }
  if (endpoint.out.take_sleeper()) signal_eventfd(endpoint.doorbell);
}

void ShmEngine::flush(Endpoint& endpoint) {
  while (!endpoint.pending.empty()) {
    const Pending& next = endpoint.pending.front();
    if (!endpoint.out.append(bytes_of(next.header), next.body)) break;
    endpoint.unsent.remove(next.counted);
    endpoint.pending.pop_front();
  }
  if (endpoint.out.take_sleeper()) signal_eventfd(endpoint.doorbell);
}

void ShmEngine::check_unsent(Endpoint& endpoint) {
  if (endpoint.unsent.over()) fail_endpoint(endpoint, ErrorCode::exhausted, Unsent::why());
}

Result<> ShmEngine::send(EndpointId id, BytesView message) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  post(**endpoint, {.kind = wire::Kind::message, .length = message.size()}, message);
  check_unsent(**endpoint);
  return {};
}

Result<> ShmEngine::write(EndpointId id, std::span<const Write> writes) {
  auto found = find_for_posting(endpoints_, regions_, id, writes);
  if (!found) return tl::unexpected(found.error());
  Endpoint& endpoint = **found;
  for (const auto& write : writes)
    if (!readable_ && write.length > kInline && !files_.contains(write.local.region.value))
      if (auto readable = check_readable(); !readable) {
        fail_endpoint(endpoint, readable.error().code, readable.error().message);
        return readable;
      }
  for (const auto& write : writes) {
    const std::uint64_t operation = endpoint.next_operation++;
    endpoint.operations[operation] = {.context = write.context, .region = write.local.region, .read = {}};
    wire::Header header{.kind = wire::Kind::write,
                        .has_notify = write.notify.has_value(),
                        .copy_flags = copy_flags(write),
                        .length = write.length,
                        .operation = operation,
                        .key = write.remote.region.key,
                        .offset = write.remote.offset,
                        .notify = write.notify.value_or(0)};
    BytesView body;
    point_at(header, body, write.local);
    post(endpoint, header, body);
  }
  return {};
}

// Says in the header where its bytes are: of few, they are the body.
void ShmEngine::point_at(wire::Header& header, BytesView& body, const LocalRange& range) {
  const std::byte* bytes = *regions_.local(range, header.length);
  if (header.length <= kInline) {
    body = {bytes, header.length};
    return;
  }
  header.address = reinterpret_cast<std::uintptr_t>(bytes);
  const auto file = files_.find(range.region.value);
  if (file == files_.end()) return;
  header.file = file->second.fd;
  header.inode = file->second.inode;
  header.file_offset = file->second.offset + range.offset;
}

Result<> ShmEngine::read(EndpointId id, std::span<const Read> reads) {
  auto found = find_for_posting(endpoints_, regions_, id, reads);
  if (!found) return tl::unexpected(found.error());
  Endpoint& endpoint = **found;
  for (const auto& read : reads) {
    const std::uint64_t operation = endpoint.next_operation++;
    endpoint.operations[operation] = {.context = read.context, .region = read.local.region, .read = read};
    ask(endpoint, operation, read, 0);
  }
  return {};
}

std::optional<ViewableRegion> ShmEngine::viewable(RegionId id) const {
  const Region* region = regions_.find(id);
  if (region == nullptr) return std::nullopt;
  ViewableRegion where{.address = reinterpret_cast<std::uintptr_t>(region->memory.data()),
                       .length = region->memory.size()};
  if (const auto file = files_.find(id.value); file != files_.end()) {
    where.file = file->second.fd;
    where.inode = file->second.inode;
    where.file_offset = file->second.offset;
  } else if (!readable_) {
    return std::nullopt;
  }
  return where;
}

Result<BytesView> ShmEngine::view(EndpointId id, const ViewableRegion& where, std::uint64_t offset,
                                  std::span<std::byte> room) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (!in_range(offset, room.size(), where.length))
    return fail(ErrorCode::invalid_argument, "bytes {}+{} are outside the peer's region of {}", offset, room.size(),
                where.length);
  const RemoteAddress remote{where.address + offset, where.file, where.inode, where.file_offset + offset};
  if (const BytesView mapped = in_place(**endpoint, remote, room.size()); !mapped.empty()) return mapped;
  if (auto copied = read_memory(**endpoint, remote.address, room); !copied) return tl::unexpected(copied.error());
  return room;
}

// For the bytes from `placed` on.
void ShmEngine::ask(Endpoint& endpoint, std::uint64_t operation, const Read& read, std::uint64_t placed) {
  post(endpoint,
       {.kind = wire::Kind::read,
        .length = read.length - placed,
        .operation = operation,
        .key = read.remote.region.key,
        .offset = read.remote.offset + placed},
       {});
}

// ---- in

// Handles one record, or a turn's part of it; false where there is none or the endpoint is gone.
bool ShmEngine::receive(Endpoint& endpoint) {
  if (endpoint.stage != Stage::open) return false;
  auto record = endpoint.in.front();
  if (!record) {
    if (endpoint.in.broken()) fail_endpoint(endpoint, ErrorCode::corrupt, "its ring is damaged");
    return false;
  }
  wire::Header header;
  BytesView body = *record;
  if (!take(body, header)) {
    fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a record without a header");
    return false;
  }
  // One that has begun may not change any more.
  if (endpoint.front) header = *std::exchange(endpoint.front, std::nullopt);
  handle(endpoint, header, body);
  if (endpoint.stage != Stage::open) return false;
  if (endpoint.front) return true;
  endpoint.moved = 0;
  endpoint.in.pop();
  return true;
}

void ShmEngine::handle(Endpoint& endpoint, const wire::Header& header, BytesView body) {
  switch (header.kind) {
    case wire::Kind::message: return events_.emit({.kind = EventKind::message, .endpoint = endpoint.id}, body);
    case wire::Kind::write: return on_write(endpoint, header, body);
    case wire::Kind::read: return on_read(endpoint, header);
    case wire::Kind::found: return on_found(endpoint, header, body);
    case wire::Kind::acknowledge: return on_acknowledge(endpoint, header);
    case wire::Kind::refused: break;  // instead of a greeting
  }
  fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a record of unknown kind");
}

// The peer's memfd, mapped for as long as the connection lasts or until others take its place; empty where it can't be
// had just now: then the same bytes are read out of the peer's memory.
BytesView ShmEngine::peer_file(Endpoint& endpoint, const RemoteAddress& remote) {
  auto& files = endpoint.files;
  const auto known =
      std::find_if(files.begin(), files.end(), [&](const PeerFile& file) { return file.inode == remote.inode; });
  if (known == files.begin() && known != files.end()) return files.front().bytes.span();
  if (known != files.end()) {
    PeerFile used = std::move(*known);
    files.erase(known);
    files.push_front(std::move(used));
    return files.front().bytes.span();
  }
  PeerFile made{.inode = remote.inode, .bytes = {}};
  const Fd fd = endpoint.process.open_file(static_cast<int>(remote.file));
  struct stat status {};
  // Its number may stand for another file by now; and what can shrink would make us fault.
  if (fd && ::fstat(fd.get(), &status) == 0 && status.st_ino == remote.inode)
    if (const auto size = sealed_size(fd); size && *size > 0)
      if (auto mapped = Mapping::of(fd, *size, false)) made.bytes = std::move(*mapped);
  if (made.bytes.span().empty()) return {};
  files.push_front(std::move(made));
  if (files.size() > kPeerFiles) files.pop_back();
  return files.front().bytes.span();
}

// Moves the bytes that a record of the peer's names, or the next of them, and returns their digest where that was
// wanted and is cheap: where they are moved in one turn.
Result<ShmEngine::Fetched> ShmEngine::fetch(Endpoint& endpoint, const wire::Header& header, BytesView body,
                                            std::byte* target) {
  if (header.address == 0) {
    if (body.size() != header.length) return fail(ErrorCode::corrupt, "it sent other bytes than it announced");
    if (!body.empty()) std::memcpy(target, body.data(), body.size());
    return Fetched{};
  }
  const std::uint64_t from = endpoint.moved, length = std::min(header.length - from, kBytesPerTurn);
  target += from;
  moved_ += length;
  endpoint.moved += length;
  Fetched fetched{.whole = endpoint.moved == header.length, .digested = std::nullopt};
  if (!fetched.whole) endpoint.front = header;
  const RemoteAddress remote{header.address + from, header.file, header.inode, header.file_offset + from};
  const BytesView mapped = in_place(endpoint, remote, length);
  if (mapped.empty()) return read_memory(endpoint, remote.address, {target, length}).map([&] { return fetched; });
  if ((header.copy_flags & wire::kDigested) != 0 && length == header.length)
    fetched.digested = Digested{{target, mapped.size()}, digest_and_copy(target, mapped)};
  else if ((header.copy_flags & wire::kStreamed) != 0) streamed_copy(target, mapped);
  else std::memcpy(target, mapped.data(), mapped.size());
  return fetched;
}

// The number of a process that has ended may be another's. Before that its socket is closed: what was read behind that
// does not count. It is looked at once in a while: numbers come round after hundreds of other processes.
Result<> ShmEngine::read_memory(Endpoint& endpoint, std::uint64_t address, std::span<std::byte> target) {
  if (auto read = endpoint.process.read(address, target); !read) return read;
  const TimePoint now = clock_.now();
  if (now - endpoint.seen_up < kNumberStays) return {};
  pollfd closed{endpoint.socket.get(), POLLRDHUP, 0};
  if (::poll(&closed, 1, 0) > 0) return fail(ErrorCode::unavailable, "the peer closed the connection");
  endpoint.seen_up = now;
  return {};
}

// The peer's bytes where they are mapped here; empty where they are not.
BytesView ShmEngine::in_place(Endpoint& endpoint, const RemoteAddress& remote, std::uint64_t length) {
  const BytesView mapped = remote.file < 0 ? BytesView{} : peer_file(endpoint, remote);
  return in_range(remote.offset, length, mapped.size()) ? mapped.subspan(remote.offset, length) : BytesView{};
}

void ShmEngine::on_write(Endpoint& endpoint, const wire::Header& header, BytesView body) {
  const auto refusal = regions_.check(header.key, header.offset, header.length, Access::remote_write);
  if (refusal == Regions::Refusal::none) {
    const auto fetched = fetch(endpoint, header, body, regions_.by_key(header.key)->memory.data() + header.offset);
    // The poster has closed and may use the memory for something else: what came is not what it posted.
    if (header.address != 0 && endpoint.in.recalls() == kGone) return endpoint.front.reset();
    if (!fetched) return fail_endpoint(endpoint, fetched.error().code, fetched.error().message);
    if (!fetched->whole) return;
    if (header.has_notify != 0)
      events_.emit(
          {.kind = EventKind::written, .endpoint = endpoint.id, .value = header.notify, .digested = fetched->digested});
  }
  answer(endpoint, header.operation, refusal);
}

void ShmEngine::answer(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal) {
  post(endpoint, {.kind = wire::Kind::acknowledge, .operation = operation, .key = static_cast<std::uint64_t>(refusal)},
       {});
  check_unsent(endpoint);
}

void ShmEngine::on_read(Endpoint& endpoint, const wire::Header& header) {
  const auto refusal = regions_.check(header.key, header.offset, header.length, Access::remote_read);
  if (refusal != Regions::Refusal::none) return answer(endpoint, header.operation, refusal);
  const RegionId region = regions_.by_key(header.key)->id;
  wire::Header found{.kind = wire::Kind::found,
                     .length = header.length,
                     .operation = header.operation,
                     .recalls = endpoint.out.recalls()};
  BytesView body;
  point_at(found, body, {region, header.offset});
  if (found.address != 0) endpoint.read_from.insert(region.value);
  post(endpoint, found, body);
  check_unsent(endpoint);
}

void ShmEngine::on_found(Endpoint& endpoint, const wire::Header& header, BytesView body) {
  const auto operation = endpoint.operations.find(header.operation);
  if (operation == endpoint.operations.end() || !operation->second.read ||
      operation->second.read->length - operation->second.placed != header.length)
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it answered what was not asked");
  if (!operation->second.withdrawn) {
    const Read& read = *operation->second.read;
    std::uint64_t& placed = operation->second.placed;
    const std::uint64_t before = endpoint.moved;  // by turns behind which nothing had been recalled
    const auto fetched = fetch(endpoint, header, body, *regions_.local(read.local, read.length) + placed);
    if (header.address != 0) {
      const std::uint64_t recalls = endpoint.in.recalls();
      if (recalls != header.recalls) endpoint.front.reset();
      if (recalls == kGone) return;  // the end of the connection ends the read
      if (recalls != header.recalls) return ask(endpoint, header.operation, read, placed += before);
    }
    if (!fetched) return fail_endpoint(endpoint, fetched.error().code, fetched.error().message);
    if (!fetched->whole) return;
    events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = read.context});
  }
  endpoint.operations.erase(operation);
}

void ShmEngine::on_acknowledge(Endpoint& endpoint, const wire::Header& header) {
  const auto operation = endpoint.operations.find(header.operation);
  const auto refusal = static_cast<Regions::Refusal>(header.key);
  if (operation == endpoint.operations.end())
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it acknowledged what was not asked");
  if (operation->second.read && refusal == Regions::Refusal::none)
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it acknowledged a read in the place of its bytes");
  if (!operation->second.withdrawn)
    events_.emit({.kind = EventKind::completed,
                  .endpoint = endpoint.id,
                  .value = operation->second.context,
                  .error = refusal_error(refusal)});
  endpoint.operations.erase(operation);
}

}  // namespace rejoin::transport::shm
