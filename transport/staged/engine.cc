#include "transport/staged/engine.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "transport/endpoints.h"
#include "transport/epoll.h"

namespace rejoin::transport::staged {

Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Engine> below, std::shared_ptr<device::Device> device,
                                            const Options& options, std::shared_ptr<device::Reducer> reducer) {
  if (options.slot_bytes == 0 || options.slots < 2)
    return fail(ErrorCode::invalid_argument, "{} slots of {} bytes for staging: there must be 2 or more, of some size",
                options.slots, options.slot_bytes);
  auto engine = std::make_unique<StagedEngine>(std::move(below), std::move(device), options, std::move(reducer));
  if (auto started = engine->start(); !started) return tl::unexpected(started.error());
  return engine;
}

Result<> StagedEngine::start() {
  for (Lane* lane : {&out_, &in_}) {
    auto copier = reducer_ ? device::make_copier(reducer_) : device::make_stream_copier(*device_);
    if (!copier) return tl::unexpected(copier.error());
    lane->copier = std::move(*copier);
    auto pinned = device_->allocate_pinned(options_.slots * options_.slot_bytes);
    if (!pinned) return tl::unexpected(pinned.error());
    lane->pinned = std::move(*pinned);
    // Two registrations: what comes in is nobody else's.
    auto region = below_->register_region(lane->pinned.bytes, MemoryKind::host,
                                          lane == &out_ ? Access::remote_read : Access::local);
    if (!region) return tl::unexpected(region.error());
    lane->region = *region;
    for (auto slot = static_cast<std::uint32_t>(options_.slots); slot > 0; --slot) lane->free.push_back(slot - 1);
  }
  if (below_->event_fd() < 0) return {};
  auto eventfd = make_eventfd();
  if (!eventfd) return tl::unexpected(eventfd.error());
  eventfd_ = std::move(*eventfd);
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return fail_errno("epoll of a staged engine");
  if (auto added = add_to(epoll_, eventfd_.get()); !added) return added;
  return add_to(epoll_, below_->event_fd());
}

StagedEngine::~StagedEngine() {
  to_offer_.clear(), to_pull_.clear();  // nothing is begun any more
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
}

// ---- regions

Result<RegionId> StagedEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  const auto as_it_is = [&] {
    return keep_below(memory, kind, access, [&] { return below_->register_region(memory, kind, access); });
  };
  if (kind == MemoryKind::host) return as_it_is();
  std::string why = "so it is asked for";
  const auto order = device_->remote_writes();
  if (order == device::Device::RemoteWrites::unordered) {
    why = "its driver neither orders a NIC's writes nor flushes them";
  } else if (order == device::Device::RemoteWrites::elsewhere) {
    why = "this transport reaches it by no dma-buf of its trainer's";
  } else if (reducer_ && order == device::Device::RemoteWrites::flushed) {
    why = "a NIC's writes there have to be flushed by the driver, which must not be called while CUDA streams wait";
  } else if (options_.direct) {
    // By dma-buf, then as peer memory, then through host memory.
    auto registered = options_.exports ? export_and_register(memory, access)
                                       : fail(ErrorCode::unreachable, "no dma-buf of it was given");
    if (registered) return registered;
    why = registered.error().message;
    registered = as_it_is();
    if (registered || registered.error().code != ErrorCode::unreachable) return registered;
    why += "; " + registered.error().message;
  }
  if (!std::exchange(noted_staging_, true))
    logger().warn("memory of {} is staged through {} of pinned host memory: {}", device_->name(),
                  human_bytes(2 * options_.slots * options_.slot_bytes), why);
  return keep(memory, access, std::nullopt);
}

Result<RegionId> StagedEngine::export_and_register(std::span<std::byte> memory, Access access) {
  const auto exported = device_->export_dma_buf(memory);
  if (!exported) return tl::unexpected(exported.error());
  return register_dma_buf({exported->fd.get(), exported->offset, memory}, access);
}

Result<RegionId> StagedEngine::register_dma_buf(const DmaBuf& buffer, Access access) {
  if (!options_.direct)
    return fail(ErrorCode::unreachable, "all memory of {} is staged, so it is asked for", device_->name());
  return keep_below(buffer.memory, MemoryKind::cuda, access, [&] { return below_->register_dma_buf(buffer, access); });
}

// Its key must not look like a staged one's; of random keys one in 65,536 does.
Result<RegionId> StagedEngine::keep_below(std::span<std::byte> memory, MemoryKind kind, Access access,
                                          const std::function<Result<RegionId>()>& register_below) {
  while (true) {
    auto registered = register_below();
    if (!registered) return registered;
    if (!wire::is_staged(below_->remote(*registered).key))
      return keep(memory, access, Reachable{*registered, kind, std::nullopt});
    below_->deregister(*registered);
  }
}

RegionId StagedEngine::keep(std::span<std::byte> memory, Access access, const std::optional<Reachable>& reachable) {
  if (!reachable) return regions_.add(memory, access, wire::kStagedKey << 48 | unguessable_.next() >> 16);
  const RegionId id = regions_.add(memory, access, below_->remote(reachable->below).key);
  reachable_[id.value] = *reachable;
  return id;
}

std::optional<RegionId> StagedEngine::below_of(RegionId region) const {
  auto found = reachable_.find(region.value);
  return found == reachable_.end() ? std::nullopt : std::optional(found->second.below);
}

Result<std::optional<RegionId>> StagedEngine::source_of(RegionId id) {
  auto found = reachable_.find(id.value);
  if (found == reachable_.end()) return std::nullopt;
  Reachable& reachable = found->second;
  const Region& region = *regions_.find(id);
  if (allows(region.access, Access::remote_read)) return reachable.below;
  if (reachable.kind != MemoryKind::host) return std::nullopt;
  if (!reachable.pulled) {
    auto pulled = below_->register_region(region.memory, reachable.kind, Access::remote_read);
    if (!pulled) return tl::unexpected(pulled.error());
    reachable.pulled = *pulled;
  }
  return reachable.pulled;
}

void StagedEngine::deregister(RegionId id) {
  if (regions_.find(id) == nullptr) return;
  regions_.remove(id);
  const auto reachable = reachable_.extract(id.value);
  for (auto& [number, pull] : pulls_)
    if (pull.target == id) pull.status = wire::Status::withdrawn;
  for (auto& [number, operation] : operations_)
    if (operation.local.region == id && !operation.error)
      operation.error = Error{ErrorCode::cancelled, "the local region was deregistered"};
  if (!reachable.empty()) {
    if (reachable.mapped().pulled) below_->deregister(*reachable.mapped().pulled);
    below_->deregister(reachable.mapped().below);
  }
  wait_for_copies([&](const Copy& copy) { return copy.region == id; });
  pump();  // its owner may sleep now: what it took from others comes back here
}

RemoteRegion StagedEngine::remote(RegionId id) const { return regions_.remote(id); }

// ---- endpoints

Result<EndpointId> StagedEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello); !checked) return tl::unexpected(checked.error());
  auto id = below_->connect(peer, bytes_of(wire::Greeting{}));
  if (!id) return id;
  auto endpoint = std::make_unique<Endpoint>(Endpoint{.id = *id});
  endpoint->hello.assign(hello.begin(), hello.end());
  endpoints_[id->value] = std::move(endpoint);
  return id;
}

// Its operations end with this error; when it returns, no memory is touched for it any more.
void StagedEngine::end(Endpoint& endpoint, const Error& error) {
  const EndpointId id = endpoint.id;
  wait_for_copies([&](const Copy& copy) { return copy.endpoint == id; });
  for (auto it = offered_.begin(); it != offered_.end();) {
    auto operation = operations_.find(it->second.operation);
    if (operation == operations_.end() || operation->second.endpoint != id) {
      ++it;
      continue;
    }
    if (it->second.slot) out_.free.push_back(*it->second.slot);
    it = offered_.erase(it);
  }
  std::erase_if(operations_, [&](const auto& entry) {
    const Operation& operation = entry.second;
    if (operation.endpoint != id) return false;
    if (!operation.request)
      events_.emit({.kind = EventKind::completed,
                    .endpoint = id,
                    .value = operation.context,
                    .error = operation.error ? operation.error : std::optional(error)});
    return true;
  });
  // What the engine below still reads for it comes back as completions, which free the slots.
  std::erase_if(pulls_, [&](const auto& entry) { return entry.second.endpoint == id; });
  endpoint.slots = endpoint.pulls = 0;
  endpoint.arriving.clear();
}

void StagedEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id);
  if (endpoint == nullptr) return;
  below_->close(id);
  endpoint->stage = Stage::failed;
  end(*endpoint, {ErrorCode::cancelled, "the endpoint was closed"});
  endpoints_.erase(id.value);
  pump();  // as in deregister()
}

void StagedEngine::fail_endpoint(Endpoint& endpoint, const Error& error) {
  if (endpoint.stage == Stage::failed) return;
  const bool unseen = endpoint.stage == Stage::accepting;
  const EndpointId id = endpoint.id;
  endpoint.stage = Stage::failed;
  endpoint.failure = error.message;
  end(endpoint, error);
  if (!unseen) return events_.emit({.kind = EventKind::closed, .endpoint = id, .error = error});
  below_->close(id);
  endpoints_.erase(id.value);  // the caller never heard of it
}

void StagedEngine::malformed(Endpoint& endpoint, std::string_view what) {
  const EndpointId id = endpoint.id;
  below_->close(id);
  fail_endpoint(endpoint, {ErrorCode::corrupt, fmt::format("the peer is gone: it sent {}", what)});
}

void StagedEngine::on_event(const Event& event) {
  if (event.kind == EventKind::completed) return on_completed(event);
  if (event.kind == EventKind::accepted) {
    wire::Greeting greeting;
    BytesView bytes = event.message;
    if (!take(bytes, greeting) || greeting.magic != wire::kMagic) {
      logger().warn("a connection was refused: it is no staged one of this version; both ends must stage, or neither");
      return below_->close(event.endpoint);
    }
    endpoints_[event.endpoint.value] =
        std::make_unique<Endpoint>(Endpoint{.id = event.endpoint, .stage = Stage::accepting});
    return;
  }
  Endpoint* endpoint = find(event.endpoint);
  if (endpoint == nullptr || endpoint->stage == Stage::failed) return;
  switch (event.kind) {
    case EventKind::connected:
      endpoint->stage = Stage::open;
      send_control(event.endpoint, wire::Kind::hello, std::exchange(endpoint->hello, {}));
      return events_.emit(event);
    case EventKind::message: return on_message(*endpoint, event.message);
    case EventKind::written: return events_.emit(event);
    case EventKind::closed:
      return fail_endpoint(*endpoint, event.error.value_or(Error{ErrorCode::unavailable, "the peer is gone"}));
    default: return;
  }
}

// ---- sleeping

std::span<const Event> StagedEngine::poll() {
  if (out_.signalled + in_.signalled > 0) {
    out_.signalled = in_.signalled = 0;
    drain_eventfd(eventfd_);
  }
  for (const auto& event : below_->poll()) on_event(event);
  advance(out_);
  advance(in_);
  pump();
  return events_.take();
}

bool StagedEngine::arm() {
  if (!events_.empty() || !below_->arm()) return false;
  for (Lane* lane : {&out_, &in_}) {
    if (lane->copies.empty() || lane->signalled == lane->copies.back().number) continue;
    if (eventfd_ && !lane->copier->signal(eventfd_)) return false;  // poll() says what is wrong, if anything
    lane->signalled = lane->copies.back().number;
  }
  return true;
}

}  // namespace rejoin::transport::staged
