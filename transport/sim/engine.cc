#include "transport/sim/engine.h"

#include <algorithm>
#include <charconv>

#include "base/digest.h"
#include "base/fail.h"
#include "transport/endpoints.h"

namespace rejoin::transport::sim {

SimEngine::~SimEngine() {
  if (!dead_) fabric_.kill(*this);
  fabric_.engines_.erase(number_);
}

Result<Address> SimEngine::listen(const Address&) {
  listening_ = true;
  return Address{fmt::format("sim:{}", number_)};
}

SimEngine::Endpoint* SimEngine::open(EndpointId id) {
  auto found = endpoints_.find(id.value);
  return found == endpoints_.end() || found->second.failed ? nullptr : &found->second;
}

Result<EndpointId> SimEngine::connect(const Address& peer, BytesView hello) {
  std::uint32_t number = 0;
  const std::string& text = peer.text;
  const bool shaped = text.starts_with("sim:");
  if (!shaped || std::from_chars(text.data() + 4, text.data() + text.size(), number).ec != std::errc{})
    return fail(ErrorCode::invalid_argument, "address '{}' is not of the form sim:N", text);
  number = fabric_.engine_at(number);
  const EndpointId mine(++fabric_.ids_made_), theirs(++fabric_.ids_made_);
  endpoints_[mine.value] = {.peer_engine = number, .peer = theirs};
  if (number == Fabric::kNobody) return mine;
  const Duration there = fabric_.delay() + fabric_.slowness(number_, number);
  fabric_.after(there, [&fabric = fabric_, from = number_, number, mine, theirs,
                        bytes = Bytes(hello.begin(), hello.end())]() mutable {
    auto* client = fabric.engine(from);
    auto* server = fabric.engine(number);
    if (client == nullptr || client->open(mine) == nullptr) return;
    if (server == nullptr || !server->listening_) return client->fail_endpoint(mine, "nobody listens there");
    auto arrive = [&fabric, from, number, mine, theirs, bytes = std::move(bytes)]() mutable {
      auto* accepting = fabric.engine(number);
      if (accepting == nullptr) return;
      accepting->endpoints_[theirs.value] = {.peer_engine = from, .peer = mine, .connected = true};
      accepting->emit({.kind = EventKind::accepted, .endpoint = theirs}, std::move(bytes));
      const Duration welcome = fabric.delay() + fabric.slowness(number, from);
      accepting->endpoints_[theirs.value].last_message = fabric.clock_.now() + welcome;  // messages come after it
      fabric.after(welcome, [&fabric, from, number, mine, theirs] {
        auto* connecting = fabric.engine(from);
        Endpoint* endpoint = connecting == nullptr ? nullptr : connecting->open(mine);
        if (endpoint == nullptr) {  // the client gave up meanwhile
          if (auto* other = fabric.engine(number)) other->fail_endpoint(theirs, "closed by the peer");
          return;
        }
        endpoint->connected = true;
        connecting->emit({.kind = EventKind::connected, .endpoint = mine});
      });
    };
    if (server->stopped_) return server->held_.push_back(std::move(arrive));
    arrive();
  });
  return mine;
}

std::optional<Duration> SimEngine::round_trip(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end() || !found->second.connected || found->second.failed) return std::nullopt;
  return 2 * fabric_.least_latency(number_, found->second.peer_engine);
}

// The machine that it arrives at answers, whatever the process there does.
void SimEngine::expect_acknowledgement(Endpoint& endpoint, Duration there) {
  const TimePoint now = fabric_.clock_.now();
  const Duration back = fabric_.options_.min_delay + fabric_.slowness(endpoint.peer_engine, number_);
  const TimePoint at = endpoint.forgotten ? TimePoint::max() : now + there + back;
  auto& all = endpoint.acknowledgements;
  for (; !all.empty() && all.front() <= now; all.pop_front()) ++endpoint.acknowledged;
  all.push_back(all.empty() ? at : std::max(all.back(), at));
}

std::optional<std::uint64_t> SimEngine::acknowledged(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end() || !found->second.connected || found->second.failed) return std::nullopt;
  const auto& all = found->second.acknowledgements;
  const auto come = static_cast<std::uint64_t>(std::ranges::upper_bound(all, fabric_.clock_.now()) - all.begin());
  if (come == all.size()) return std::nullopt;
  return found->second.acknowledged + come;
}

Result<RegionId> SimEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  if (kind != MemoryKind::host) return fail(ErrorCode::unreachable, "simulated rails reach host memory only");
  if (refuse_memory_ > 0 && refuse_memory_-- > 0)
    return fail(ErrorCode::exhausted, "registration of {} bytes failed: no memory can be locked", memory.size());
  registering_ += std::exchange(slow_memory_, {});
  const RegionId id(++fabric_.ids_made_);
  regions_[id.value] = {memory, fabric_.random_(), access};
  return id;
}

void SimEngine::deregister(RegionId region) {
  const auto found = regions_.find(region.value);
  if (found == regions_.end()) return;
  for (const auto& [operation, moving] : std::map(fabric_.moving_)) {
    const bool out = moving.from == number_ && moving.local == region;
    const bool in = moving.to == number_ && moving.remote_key == found->second.key;
    if (out || in)
      fabric_.break_there(*this, out ? moving.endpoint : moving.peer, fabric_.delay(), "memory was withdrawn");
  }
  regions_.erase(found);
}

RemoteRegion SimEngine::remote(RegionId region) const {
  const auto found = regions_.find(region.value);
  if (found == regions_.end()) return {};
  return {found->second.key, found->second.memory.size()};
}

SimEngine::Region* SimEngine::region_of_key(std::uint64_t key) {
  for (auto& [id, region] : regions_)
    if (region.key == key) return &region;
  return nullptr;
}

Result<> SimEngine::check(EndpointId id, const LocalRange& local, std::uint64_t length) const {
  auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return fail(ErrorCode::not_found, "endpoint {:x} is closed", id.value);
  if (found->second.failed || !found->second.connected)
    return fail(ErrorCode::unavailable, "endpoint {:x} is not connected", id.value);
  auto region = regions_.find(local.region.value);
  if (region == regions_.end())
    return fail(ErrorCode::not_found, "local region {} is not registered", local.region.value);
  if (!in_range(local.offset, length, region->second.memory.size()))
    return fail(ErrorCode::invalid_argument, "bytes {}+{} are outside the local region of {}", local.offset, length,
                region->second.memory.size());
  return {};
}

Result<> SimEngine::send(EndpointId id, BytesView message) {
  Endpoint* endpoint = open(id);
  if (endpoint == nullptr || !endpoint->connected)
    return fail(ErrorCode::unavailable, "endpoint {:x} is not connected", id.value);
  if (auto checked = check_message(message); !checked) return checked;
  const TimePoint now = fabric_.clock_.now();
  const Duration there = fabric_.delay() + fabric_.slowness(number_, endpoint->peer_engine);
  endpoint->last_message = std::max(endpoint->last_message + Duration(1), now + there);
  expect_acknowledgement(*endpoint, endpoint->last_message - now);
  if (endpoint->forgotten) return {};
  *endpoint->unheard += message.size();
  const std::shared_ptr<void> weight(nullptr, [unheard = endpoint->unheard, size = message.size()](void*) {
    *unheard -= size;  // heard, or lost
  });
  fabric_.after(endpoint->last_message - now,
                [&fabric = fabric_, from = number_, to = endpoint->peer_engine, id, weight, peer = endpoint->peer,
                 bytes = Bytes(message.begin(), message.end())] {
                  auto* sender = fabric.engine(from);
                  auto* receiver = fabric.engine(to);
                  if (sender == nullptr || receiver == nullptr || sender->open(id) == nullptr) return;
                  auto arrive = [receiver, peer, bytes, weight] {
                    if (receiver->open(peer) != nullptr)
                      receiver->emit({.kind = EventKind::message, .endpoint = peer}, bytes, weight);
                  };
                  if (receiver->stopped_) return receiver->held_.push_back(arrive);
                  arrive();
                });
  return {};
}

Result<> SimEngine::write(EndpointId id, std::span<const Write> writes) {
  for (const auto& write : writes)
    if (auto checked = check(id, write.local, write.length); !checked) return checked;
  for (const auto& write : writes) start(id, Direction::write, write);
  return {};
}

Result<> SimEngine::read(EndpointId id, std::span<const Read> reads) {
  for (const auto& read : reads)
    if (auto checked = check(id, read.local, read.length); !checked) return checked;
  for (const auto& read : reads)
    start(id, Direction::read,
          {.context = read.context, .local = read.local, .remote = read.remote, .length = read.length});
  return {};
}

std::optional<ViewableRegion> SimEngine::viewable(RegionId region) const {
  const auto found = regions_.find(region.value);
  if (!fabric_.options_.viewable || found == regions_.end()) return std::nullopt;
  const auto memory = found->second.memory;
  return ViewableRegion{.address = reinterpret_cast<std::uintptr_t>(memory.data()), .length = memory.size()};
}

// Now in place, now by a copy. A process that is stopped can be looked at, one that is gone can't.
Result<BytesView> SimEngine::view(EndpointId id, const ViewableRegion& where, std::uint64_t offset,
                                  std::span<std::byte> room) {
  const Endpoint* endpoint = open(id);
  const SimEngine* peer = endpoint == nullptr ? nullptr : fabric_.engine(endpoint->peer_engine);
  if (peer == nullptr)
    return fail(ErrorCode::unavailable, "endpoint {:x} is not connected, or its peer is gone", id.value);
  const auto holds = [&](const auto& one) {
    return reinterpret_cast<std::uintptr_t>(one.second.memory.data()) == where.address &&
           in_range(offset, room.size(), one.second.memory.size());
  };
  const auto found = std::ranges::find_if(peer->regions_, holds);
  if (found == peer->regions_.end())
    return fail(ErrorCode::not_found, "bytes {}+{} are in no region of the peer's", offset, room.size());
  const BytesView bytes = BytesView(found->second.memory).subspan(offset, room.size());
  if (fabric_.random_() % 2 == 0) return bytes;
  std::ranges::copy(bytes, room.begin());
  return room;
}

// The bytes move at one instant between posting and completion, not at posting: a source that changes too early shows.
// With late writes it is the other way round: what left goes on, and only a closed receiver stops it. Of a poster that
// was killed they land in part, or whole.
void SimEngine::start(EndpointId id, Direction direction, const Write& what) {
  Endpoint& endpoint = endpoints_.at(id.value);
  const std::uint64_t operation = ++fabric_.ids_made_;
  endpoint.outstanding.insert(operation);
  endpoint.contexts[operation] = what.context;
  if (endpoint.forgotten) return expect_acknowledgement(endpoint, {});
  OnItsWay moved{what, number_, endpoint.peer_engine, id, endpoint.peer, operation, direction, {}};
  if (fabric_.options_.late_writes && direction == Direction::write) {
    const std::byte* bytes = regions_.at(what.local.region.value).memory.data() + what.local.offset;
    moved.left.emplace(bytes, bytes + what.length);
  }
  if (fabric_.options_.withdrawal_breaks)
    fabric_.moving_[operation] = {number_,       endpoint.peer_engine, id,
                                  endpoint.peer, what.local.region,    what.remote.region.key};
  if (const auto* peer = fabric_.engine(endpoint.peer_engine); peer != nullptr && peer->room_ != room_)
    fabric_.bytes_between_rooms_ += what.length;
  const Duration there = (moved.left ? fabric_.late_delay() : fabric_.delay()) +
                         (direction == Direction::write ? fabric_.slowness(number_, endpoint.peer_engine)
                                                        : fabric_.slowness(endpoint.peer_engine, number_));
  expect_acknowledgement(endpoint, there);
  fabric_.after(there, [&fabric = fabric_, moved = std::move(moved)]() mutable { land(fabric, std::move(moved)); });
}

// Waits for whoever is stopped and has to do with it: both processes, or where a NIC does it, none but the reader's.
void SimEngine::land(Fabric& fabric, OnItsWay moved) {
  for (auto number : {moved.to, moved.from}) {
    auto* engine = fabric.engine(number);
    if (engine == nullptr || !engine->stopped_) continue;
    const bool needed = number == moved.to ? !fabric.options_.lands_stopped : !moved.left;
    if (!needed) continue;
    return engine->held_.push_back([&fabric, moved = std::move(moved)]() mutable { land(fabric, std::move(moved)); });
  }
  fabric.moving_.erase(moved.operation);
  auto* sender = fabric.engine(moved.from);
  auto* receiver = fabric.engine(moved.to);
  if (receiver == nullptr || (!moved.left && (sender == nullptr || sender->open(moved.endpoint) == nullptr))) return;
  const bool closed = receiver->open(moved.peer) == nullptr;
  if (closed && !fabric.options_.unfenced) return;
  if (sender == nullptr && moved.length > 0 && fabric.random_() % 2 == 0) {
    moved.length = fabric.random_() % moved.length;
    moved.notify.reset();
  }
  std::optional<Digested> digested;
  const std::optional<Error> error = receiver->take_bytes(sender, moved, digested);
  if (!error && closed) ++fabric.stale_writes_;
  if (!error && moved.notify && !closed)
    receiver->emit({.kind = EventKind::written, .endpoint = moved.peer, .value = *moved.notify, .digested = digested});
  fabric.after(fabric.delay() + fabric.slowness(moved.to, moved.from),
               [&fabric, from = moved.from, id = moved.endpoint, operation = moved.operation, error] {
                 if (auto* poster = fabric.engine(from)) poster->complete(id, operation, error);
               });
}

Regions::Refusal SimEngine::refusal_of(const OnItsWay& moved) {
  const Region* region = region_of_key(moved.remote.region.key);
  if (region == nullptr) return Regions::Refusal::bad_key;
  const Access needed = moved.direction == Direction::write ? Access::remote_write : Access::remote_read;
  return transport::refusal_of(moved.remote.offset, moved.length, needed, region->memory.size(), region->access);
}

std::optional<Error> SimEngine::take_bytes(const SimEngine* sender, const OnItsWay& moved,
                                           std::optional<Digested>& digested) {
  if (auto error = refusal_error(refusal_of(moved))) {
    ++refused_;
    return error;
  }
  auto* far = region_of_key(moved.remote.region.key)->memory.data() + moved.remote.offset;
  if (moved.left) {
    if (moved.length > 0) std::memcpy(far, moved.left->data(), moved.length);
  } else {
    auto source = sender->regions_.find(moved.local.region.value);
    if (source == sender->regions_.end()) return Error{ErrorCode::cancelled, "the local region was deregistered"};
    auto* near = source->second.memory.data() + moved.local.offset;
    const bool write = moved.direction == Direction::write;
    if (moved.length > 0) std::memcpy(write ? far : near, write ? near : far, moved.length);
  }
  if (moved.direction == Direction::write && moved.length > 0 && std::exchange(damage_, false))
    far[fabric_.random_() % moved.length] ^= std::byte{1} << static_cast<int>(moved.operation % 8);
  // Some copy what is written to them, and some don't. Whoever does takes the digest of the bytes that it writes.
  if (const BytesView bytes(far, moved.length); moved.digested && moved.operation % 2 == 1)
    digested = Digested{bytes, digest(bytes)};
  return std::nullopt;
}

void SimEngine::complete(EndpointId id, std::uint64_t operation, std::optional<Error> error) {
  auto found = endpoints_.find(id.value);
  if (found == endpoints_.end() || found->second.outstanding.erase(operation) == 0) return;
  const std::uint64_t context = found->second.contexts.extract(operation).mapped();
  emit({.kind = EventKind::completed, .endpoint = id, .value = context, .error = std::move(error)});
}

void SimEngine::fail_endpoint(EndpointId id, const std::string& why) {
  Endpoint* endpoint = open(id);
  if (endpoint == nullptr) return;
  endpoint->failed = true;
  const Error error{ErrorCode::unavailable, "the peer is gone: " + why};
  for (auto operation : std::set(endpoint->outstanding)) complete(id, operation, error);
  emit({.kind = EventKind::closed, .endpoint = id, .error = error});
}

void SimEngine::close(EndpointId id) {
  auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return;
  for (auto operation : std::set(found->second.outstanding))
    complete(id, operation, Error{ErrorCode::cancelled, "the endpoint was closed"});
  const auto peer_engine = found->second.peer_engine;
  const auto peer = found->second.peer;
  const bool forgotten = found->second.forgotten;
  endpoints_.erase(found);
  if (forgotten) return;  // nor does its end come there
  const Duration seen = (fabric_.options_.late_writes ? fabric_.options_.detection : fabric_.delay()) +
                        fabric_.parted(number_, peer_engine);
  fabric_.after(seen, [&fabric = fabric_, peer_engine, peer] {
    if (auto* other = fabric.engine(peer_engine)) other->fail_endpoint(peer, "closed by the peer");
  });
}

std::span<const Event> SimEngine::poll() {
  handed_out_.clear();
  events_.clear();
  if (stopped_ || dead_) return {};
  handed_out_.swap(pending_);
  for (auto& queued : handed_out_) {
    queued.event.message = queued.message;
    events_.push_back(queued.event);
  }
  return events_;
}

}  // namespace rejoin::transport::sim
