#include "nccl/net.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::nccl {

using transport::Event;
using transport::EventKind;

namespace {

constexpr std::uint64_t kReady = 0x7964616572;  // the sender's first and only message

// A write's notification: which receive of which grant, and how many bytes.
constexpr int kSizeBits = 45, kPlaceBits = 3;
constexpr std::uint64_t notification(std::uint64_t grant, std::uint64_t place, std::uint64_t size) {
  return grant << (kSizeBits + kPlaceBits) | place << kSizeBits | size;
}

}  // namespace

Result<Grant> parse_grant(BytesView message) {
  Grant grant;
  if (!take(message, grant.number) || !take(message, grant.count) || grant.count == 0 || grant.count > kMaxGroup ||
      message.size() != grant.count * sizeof(Grant::Buffer))
    return fail(ErrorCode::corrupt, "the receiver sent a message that can't be a grant");
  for (std::uint64_t i = 0; i < grant.count; ++i) {
    (void)take(message, grant.buffers[i]);  // of that size, as has been seen
    grant.buffers[i].used = 0;
  }
  return grant;
}

// ---- memory

Result<Region*> Device::add_region(Use use, std::span<std::byte> memory, bool cuda, const transport::DmaBuf* dma_buf) {
  using transport::Access;
  std::scoped_lock lock(mutex_);
  // What is received is written by the peer, and from a GPU's memory a flush reads through the NIC. That is for both
  // uses alike: what its user names (ncclCommRegister) NCCL registers for sends, and then asks for in receives, too.
  const Access access = cuda               ? Access::remote_write | Access::remote_read
                        : use == Use::send ? Access::local
                                           : Access::remote_write;
  for (auto& [begin, region] : regions_) {
    if (begin > memory.data()) break;
    if (region->cuda != cuda || !allows(region->access, access) ||
        begin + region->memory.size() < memory.data() + memory.size())
      continue;
    ++region->uses;
    return region.get();
  }
  if (cuda)
    if (auto looped = connect_to_self(); !looped) return tl::unexpected(looped.error());
  const auto kind = cuda ? transport::MemoryKind::cuda : transport::MemoryKind::host;
  auto id =
      dma_buf != nullptr ? engine_->register_dma_buf(*dma_buf, access) : engine_->register_region(memory, kind, access);
  if (!id) return tl::unexpected(id.error());
  return regions_.emplace(memory.data(), std::make_unique<Region>(Region{*id, memory, access, 1, cuda}))->second.get();
}

void Device::remove_region(Region* region) {
  std::scoped_lock lock(mutex_);
  if (--region->uses > 0) return;
  engine_->deregister(region->id);
  auto [first, last] = regions_.equal_range(region->memory.data());
  for (auto it = first; it != last; ++it)
    if (it->second.get() == region) {
      regions_.erase(it);
      return;
    }
}

// ---- sends and receives

Request* Device::take_request(Connection& connection, Request::Kind kind) {
  auto first = connection.requests.begin() + (kind == Request::Kind::flush ? kReceives : 0);
  auto found = std::find_if(first, connection.requests.end(),
                            [](const Request& request) { return request.kind == Request::Kind::free; });
  if (found == connection.requests.end()) return nullptr;
  *found = {.connection = &connection, .kind = kind, .count = 1};
  return &*found;
}

Result<Request*> Device::send(Connection& connection, std::span<std::byte> data, int tag, const Region& region) {
  std::scoped_lock lock(mutex_);
  if (data.size() > kMaxMessage)
    return fail(ErrorCode::invalid_argument, "a message of {} bytes: {} is the most", data.size(), kMaxMessage);
  if (connection.grants.empty()) progress();
  if (connection.error) return tl::unexpected(*connection.error);
  if (connection.grants.empty()) return nullptr;
  Grant& grant = connection.grants.front();
  auto* end = grant.buffers.begin() + grant.count;
  auto* place = std::find_if(grant.buffers.begin(), end,
                             [&](const Grant::Buffer& one) { return one.used == 0 && one.tag == tag; });
  if (place == end) return nullptr;
  data = data.first(std::min<std::size_t>(data.size(), place->size));  // what a receive has no room for is not sent
  Request* request = take_request(connection, Request::Kind::send);
  if (request == nullptr) return nullptr;
  request->sizes[0] = static_cast<int>(std::min<std::size_t>(data.size(), INT32_MAX));
  request->operation = operations_.add(request);
  const transport::Write write{
      .context = request->operation,
      .local = {region.id, static_cast<std::uint64_t>(data.data() - region.memory.data())},
      .remote = {place->region, place->offset},
      .length = data.size(),
      .notify = notification(grant.number, static_cast<std::uint64_t>(place - grant.buffers.begin()), data.size())};
  if (auto posted = engine_->write(connection.endpoint, {&write, 1}); !posted) {
    operations_.erase(request->operation);
    request->kind = Request::Kind::free;
    return tl::unexpected(posted.error());
  }
  place->used = 1;
  if (std::all_of(grant.buffers.begin(), end, [](const Grant::Buffer& one) { return one.used != 0; }))
    connection.grants.pop_front();
  return request;
}

Result<Request*> Device::receive(Connection& connection, std::span<const Target> targets) {
  std::scoped_lock lock(mutex_);
  if (connection.error) return tl::unexpected(*connection.error);
  Request& request = connection.requests[connection.next_grant % kReceives];
  if (request.kind != Request::Kind::free) return nullptr;
  request = {.connection = &connection,
             .kind = Request::Kind::receive,
             .count = static_cast<int>(targets.size()),
             .operation = connection.next_grant};
  Bytes message = joined(connection.next_grant, bytes_of(std::uint64_t{targets.size()}));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Target& target = targets[i];
    request.most[i] = target.memory.size();
    const Grant::Buffer place{.region = engine_->remote(target.region->id),
                              .offset = static_cast<std::uint64_t>(target.memory.data() - target.region->memory.data()),
                              .size = target.memory.size(),
                              .tag = target.tag};
    const auto bytes = bytes_of(place);
    message.insert(message.end(), bytes.begin(), bytes.end());
  }
  if (auto sent = engine_->send(connection.endpoint, message); !sent) {
    request.kind = Request::Kind::free;
    return tl::unexpected(sent.error());
  }
  ++connection.next_grant;
  progress();  // the sender waits for it
  return &request;
}

// What a NIC has written into a GPU's memory may still be on its way there when its completion is seen; a read through
// the same NIC comes after it, so there is one through each. Null: there is nothing to flush.
Result<Request*> Device::flush(Connection& connection, std::span<const Target> targets) {
  std::scoped_lock lock(mutex_);
  const auto last = std::find_if(targets.rbegin(), targets.rend(),
                                 [](const Target& target) { return target.region->cuda && !target.memory.empty(); });
  if (last == targets.rend()) return nullptr;
  if (auto looped = connect_to_self(); !looped) return tl::unexpected(looped.error());
  Request* request = take_request(connection, Request::Kind::flush);
  // NCCL would take null for nothing to flush, and read what may not be there yet.
  if (request == nullptr)
    return fail(ErrorCode::exhausted, "more than {} flushes are under way on one connection", kReceives);
  request->operation = operations_.add(request);
  const transport::Read read{.context = request->operation,
                             .local = {scratch_region_, 0},
                             .remote = {engine_->remote(last->region->id),
                                        static_cast<std::uint64_t>(last->memory.data() - last->region->memory.data())},
                             .length = 1,
                             .on_each_rail = true};
  while (!loop_ready_ && loop_ != transport::EndpointId{}) progress();  // it was begun with the registration
  auto posted = loop_ready_ ? engine_->read(loop_, {&read, 1})
                            : fail(ErrorCode::unavailable, "the connection to ourselves, for flushes, has failed");
  if (posted) return request;
  operations_.erase(request->operation);
  request->kind = Request::Kind::free;
  return tl::unexpected(posted.error());
}

Result<bool> Device::test(Request& request, int* sizes) {
  std::scoped_lock lock(mutex_);
  const auto done = [&] { return request.landed == request.count; };
  if (!done() && !request.error) progress();
  if (request.error) return tl::unexpected(*request.error);
  if (!done()) {
    if (request.connection->error) return tl::unexpected(*request.connection->error);
    return false;
  }
  if (sizes != nullptr) std::copy_n(request.sizes.begin(), request.count, sizes);
  request.kind = Request::Kind::free;
  return true;
}

// ---- what happens

void Device::progress() {
  for (const auto& event : engine_->poll()) on_event(event);
}

void Device::fail_connection(Connection& connection, const Error& error) {
  if (!connection.error) connection.error = error;
}

void Device::on_event(const Event& event) {
  if (event.kind == EventKind::completed) {
    auto request = operations_.remove(event.value);
    if (!request) return;  // its connection was closed
    ++(*request)->landed;
    if (event.error) (*request)->error = event.error;
    return;
  }
  if (event.kind == EventKind::accepted) {
    Hello hello;
    BytesView bytes = event.message;
    if (!take(bytes, hello) || hello.magic != kMagic) {
      logger().warn("a connection was refused: its peer is not this plugin in this version");
      return engine_->close(event.endpoint);
    }
    if (hello.listener == loop_id_ && loop_ != transport::EndpointId{}) return;  // our own
    auto found = listeners_.find(hello.listener);
    if (found == listeners_.end()) return engine_->close(event.endpoint);  // closed meanwhile
    return found->second->accepted.push_back({event.endpoint, false, {}});
  }
  if (event.endpoint == loop_) {
    loop_ready_ = event.kind == EventKind::connected;
    if (!loop_ready_) engine_->close(std::exchange(loop_, {}));
    return;
  }
  auto found = connections_.find(event.endpoint.value);
  if (found == connections_.end()) return on_event_of_accepted(event);
  Connection& connection = *found->second;
  switch (event.kind) {
    case EventKind::connected:
      connection.connected = true;
      // Refused: the connection is about to report its end.
      return (void)engine_->send(event.endpoint, bytes_of(kReady));
    case EventKind::written: return on_written(connection, event.value);
    case EventKind::closed:
      return fail_connection(connection,
                             event.error.value_or(Error{ErrorCode::unavailable, "the peer closed the connection"}));
    case EventKind::message: {
      auto grant = parse_grant(event.message);
      if (!grant) return fail_connection(connection, grant.error());
      if (!connection.sends || connection.grants.size() >= kReceives || grant->number != connection.next_grant)
        return fail_connection(connection, {ErrorCode::corrupt, "the receiver sent a grant out of place"});
      ++connection.next_grant;
      return connection.grants.push_back(*grant);
    }
    default: return;
  }
}

void Device::on_written(Connection& connection, std::uint64_t value) {
  const std::uint64_t grant = value >> (kSizeBits + kPlaceBits);
  const auto place = static_cast<std::size_t>(value >> kSizeBits & ((1u << kPlaceBits) - 1));
  const std::uint64_t size = value & ((std::uint64_t{1} << kSizeBits) - 1);
  Request* request = connection.sends ? nullptr : &connection.requests[grant % kReceives];
  if (request == nullptr || request->kind != Request::Kind::receive || (request->operation & 0xffff) != grant ||
      place >= static_cast<std::size_t>(request->count) || request->in[place] || size > request->most[place])
    return fail_connection(connection, {ErrorCode::corrupt, "the sender names a receive that was not posted"});
  request->in[place] = true;
  request->sizes[place] = static_cast<int>(std::min<std::uint64_t>(size, INT32_MAX));
  ++request->landed;
}

}  // namespace rejoin::nccl
