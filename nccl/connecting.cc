// How a device's connections come and go.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/fail.h"
#include "nccl/net.h"
#include "transport/acceptor.h"
#include "transport/regions.h"
#include "transport/tcp/factory.h"

namespace rejoin::nccl {

using transport::Event;
using transport::EventKind;

namespace {

constexpr int kTries = 5;                                    // of a connection
constexpr auto kFirstPause = std::chrono::milliseconds(50);  // between two of them; doubles
constexpr auto kLookForDescriptors = std::chrono::seconds(1);
constexpr int kLacking = 5;                           // looks in turn
constexpr auto kForgotten = std::chrono::minutes(2);  // NCCL calls all the time while it wants a connection

std::array<std::uint64_t, 2> fresh_id() {
  static transport::Unguessable unguessable;
  static std::mutex mutex;
  std::scoped_lock lock(mutex);
  return {unguessable.next(), unguessable.next()};
}

}  // namespace

Result<std::shared_ptr<Device>> Device::make(std::unique_ptr<transport::Engine> engine, const std::string& address,
                                             const Clock& clock, const Family& family) {
  std::shared_ptr<Device> device(new Device(clock, family));
  device->engine_ = std::move(engine);
  auto where = device->engine_->listen({address + ":0"});
  if (!where) return tl::unexpected(where.error());
  device->address_ = *where;
  auto scratch =
      device->engine_->register_region(device->scratch_, transport::MemoryKind::host, transport::Access::local);
  if (!scratch) return tl::unexpected(scratch.error());
  device->scratch_region_ = *scratch;
  if (where->text.size() + 2 <= sizeof Handle::address) return device;
  if (auto opened = device->open_control(); !opened) return tl::unexpected(opened.error());
  auto asked = device->control_->listen({address + ":0"});
  if (!asked) return tl::unexpected(asked.error());
  device->control_address_ = *asked;
  return device;
}

Result<> Device::open_control() {
  if (control_ != nullptr) return {};
  auto control = transport::tcp::make_engine({});
  if (!control) return tl::unexpected(control.error());
  control_ = std::move(*control);
  return {};
}

Device::~Device() { end(); }

void Device::end() {
  give_up_all();
  std::scoped_lock lock(mutex_);
  for (const auto& [begin, region] : regions_) engine_->deregister(region->id);
  regions_.clear();
  engine_.reset();
  control_.reset();
}

Result<std::unique_ptr<Listener>> Device::listen(Handle& handle) {
  std::scoped_lock lock(mutex_);
  give_up_forgotten();
  auto listener = std::make_unique<Listener>();
  listener->device = shared_from_this();
  listener->id = fresh_id();
  listener->without_descriptor = transport::accepts_without_descriptor();
  handle = {.magic = kMagic, .listener = {listener->id[0], listener->id[1]}, .family = family_};
  const std::string text = control_address_.text.empty() ? "=" + address_.text : "@" + control_address_.text;
  std::memcpy(handle.address, text.c_str(), text.size() + 1);
  listeners_[listener->id] = listener.get();
  return listener;
}

// NCCL has no call that ends a connect under way: a communicator that is aborted meanwhile just does not call again.
// Each holds on to its device until it has its connection or is forgotten.
void Device::give_up_forgotten() {
  for (auto it = connecting_.begin(); it != connecting_.end();) {
    const auto next = std::next(it);
    if (clock_.now() - it->second->asked > kForgotten) {
      end_try(*it->second);
      connecting_.erase(it);
    }
    it = next;
  }
}

void Device::give_up_all() {
  std::scoped_lock lock(mutex_);
  for (const auto& [number, connecting] : connecting_) end_try(*connecting);
  connecting_.clear();
}

// What this handle's connection has come to; made where it is new or was forgotten.
Result<Device::Connecting*> Device::find_connecting(Handle& handle) {
  const auto found = connecting_.find(handle.connecting);
  if (found != connecting_.end()) return found->second.get();
  if (handle.magic != kMagic || ::memchr(handle.address, 0, sizeof handle.address) == nullptr ||
      (handle.address[0] != '=' && handle.address[0] != '@'))
    return fail(ErrorCode::mismatch, "the peer's handle is not of this plugin's version; both must load the same");
  if (handle.family.told() && family_.told() && handle.family != family_)
    return fail(
        ErrorCode::mismatch,
        "the peer's device is of {}, and this one of {}: set REJOIN_NCCL_DEVICES alike on all nodes, also in how many "
        "addresses or ports a device has, and threads, which make several rails of one. Where it is not set, each node "
        "takes its active RDMA ports, and tcp where it has none",
        handle.family.text(), family_.text());
  auto begun = std::make_unique<Connecting>();
  begun->connection = std::make_unique<Connection>();
  begun->connection->device = shared_from_this();
  begun->connection->sends = true;
  begun->connection->requests.resize(kSends);
  handle.connecting = fresh_id()[0];  // another device has no such one
  return (connecting_[handle.connecting] = std::move(begun)).get();
}

Result<> Device::begin_try(Connecting& connecting, const Handle& handle) {
  connecting.try_at = TimePoint::max();
  const std::string address = handle.address + 1;
  if (handle.address[0] == '=') return begin_connection(connecting, handle, address);
  if (auto opened = open_control(); !opened) return opened;
  auto control = control_->connect({address}, {});
  if (!control) return tl::unexpected(control.error());
  connecting.asking = Asking{.control = *control, .address = {}, .error = {}};
  asking_[control->value] = &*connecting.asking;
  return {};
}

Result<> Device::begin_connection(Connecting& connecting, const Handle& handle, const std::string& address) {
  const Hello hello{.listener = {handle.listener[0], handle.listener[1]}};
  auto endpoint = engine_->connect({address}, bytes_of(hello));
  if (!endpoint) return tl::unexpected(endpoint.error());
  connecting.connection->endpoint = *endpoint;
  connections_[endpoint->value] = connecting.connection.get();
  return {};
}

// An error: this try has failed.
Result<> Device::go_on(Connecting& connecting, const Handle& handle) {
  if (connecting.try_at <= clock_.now())
    if (auto begun = begin_try(connecting, handle); !begun) return begun;
  progress();
  progress_control();
  if (auto& asking = connecting.asking) {
    if (asking->error) return tl::unexpected(*asking->error);
    if (asking->address.empty()) return {};
    const std::string address = asking->address;
    end_try(connecting);
    if (auto begun = begin_connection(connecting, handle, address); !begun) return begun;
  }
  if (connecting.connection->error) return tl::unexpected(*connecting.connection->error);
  return {};
}

void Device::end_try(Connecting& connecting) {
  if (connecting.asking) {
    asking_.erase(connecting.asking->control.value);
    control_->close(connecting.asking->control);
    connecting.asking.reset();
  }
  Connection& connection = *connecting.connection;
  if (connections_.erase(connection.endpoint.value) > 0) engine_->close(connection.endpoint);
  connection.endpoint = {};
  connection.connected = false;
  connection.error.reset();
}

Result<std::unique_ptr<Connection>> Device::connect(Handle& handle) {
  std::scoped_lock lock(mutex_);
  give_up_forgotten();
  auto found = find_connecting(handle);
  if (!found) return tl::unexpected(found.error());
  Connecting& connecting = **found;
  connecting.asked = clock_.now();
  const auto gone_on = go_on(connecting, handle);
  if (!gone_on) {
    end_try(connecting);
    const ErrorCode code = gone_on.error().code;
    // Who has not answered in time may be a process that does something else; who has gone is asked a few times.
    const bool again = code == ErrorCode::timeout || (code == ErrorCode::unavailable && ++connecting.tries < kTries);
    if (again) {
      connecting.try_at = clock_.now() + kFirstPause * (1 << connecting.tries);
      return nullptr;
    }
    connecting_.erase(std::exchange(handle.connecting, 0));
    return tl::unexpected(gone_on.error());
  }
  if (!connecting.connection->connected) return nullptr;
  progress();  // the receiver waits to hear of it
  auto connection = std::move(connecting.connection);
  connecting_.erase(std::exchange(handle.connecting, 0));
  return connection;
}

Result<std::unique_ptr<Connection>> Device::accept(Listener& listener) {
  std::scoped_lock lock(mutex_);
  progress();
  progress_control();
  auto found =
      std::find_if(listener.accepted.begin(), listener.accepted.end(), [](const auto& one) { return one.ready; });
  if (found == listener.accepted.end()) {
    if (auto enough = look_for_descriptors(listener); !enough) return tl::unexpected(enough.error());
    return nullptr;
  }
  listener.lacking = 0;
  auto connection = std::make_unique<Connection>();
  connection->device = shared_from_this();
  connection->endpoint = found->endpoint;
  connection->error = found->error;
  connection->connected = true;
  connection->requests.resize(2 * kReceives);
  listener.accepted.erase(found);
  connections_[connection->endpoint.value] = connection.get();
  return connection;
}

// An engine without a descriptor leaves who calls waiting until there is one, since others may be closed meanwhile.
// Here nothing else happens before this connection is there. Where nobody calls yet none is missing.
Result<> Device::look_for_descriptors(Listener& listener) const {
  const TimePoint now = clock_.now();
  if (now - listener.looked < kLookForDescriptors) return {};
  listener.looked = now;
  const std::uint64_t before = std::exchange(listener.without_descriptor, transport::accepts_without_descriptor());
  listener.lacking = listener.without_descriptor == before ? 0 : listener.lacking + 1;
  if (listener.lacking < kLacking) return {};
  return fail(ErrorCode::exhausted,
              "somebody who calls can't be accepted, since this process has no descriptor left: raise the limit with "
              "'ulimit -n'");
}

void Device::close(Listener& listener) {
  std::scoped_lock lock(mutex_);
  listeners_.erase(listener.id);
  for (const auto& one : listener.accepted) engine_->close(one.endpoint);
}

// Nothing of it lands any more when this returns; its requests are gone with it.
void Device::close(Connection& connection) {
  std::scoped_lock lock(mutex_);
  engine_->close(connection.endpoint);
  connections_.erase(connection.endpoint.value);
  for (const auto& request : connection.requests)
    if (request.kind == Request::Kind::send || request.kind == Request::Kind::flush)
      if (operations_.find(request.operation) != nullptr) operations_.erase(request.operation);
}

Result<> Device::connect_to_self() {
  if (loop_ != transport::EndpointId{}) return {};
  loop_id_ = fresh_id();
  auto endpoint = engine_->connect(address_, bytes_of(Hello{.listener = loop_id_}));
  if (!endpoint) return tl::unexpected(endpoint.error());
  loop_ = *endpoint;
  return {};
}

void Device::progress_control() {
  if (control_ == nullptr) return;
  for (const auto& event : control_->poll()) {
    if (event.kind == EventKind::accepted) (void)control_->send(event.endpoint, as_bytes(address_.text));
    auto found = asking_.find(event.endpoint.value);
    if (found == asking_.end()) {
      if (event.kind == EventKind::closed) control_->close(event.endpoint);  // it has its answer
      continue;
    }
    if (event.kind == EventKind::message) found->second->address = as_text(event.message);
    if (event.kind == EventKind::closed)
      found->second->error = event.error.value_or(Error{ErrorCode::unavailable, "the listener is gone"});
  }
}

// Of a connection that NCCL has not taken yet.
void Device::on_event_of_accepted(const Event& event) {
  for (auto& [id, listener] : listeners_) {
    auto& accepted = listener->accepted;
    auto found =
        std::find_if(accepted.begin(), accepted.end(), [&](const auto& one) { return one.endpoint == event.endpoint; });
    if (found == accepted.end()) continue;
    if (event.kind == EventKind::message) found->ready = true;
    if (event.kind != EventKind::closed) return;
    found->error = event.error.value_or(Error{ErrorCode::unavailable, "the peer closed the connection"});
    if (found->ready) return;  // NCCL gets it, and hears of its end when it uses it
    accepted.erase(found);
    return engine_->close(event.endpoint);
  }
  if (event.kind == EventKind::closed) engine_->close(event.endpoint);  // the far end of the one to ourselves
}

}  // namespace rejoin::nccl
