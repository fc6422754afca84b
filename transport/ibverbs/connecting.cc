// How two engines connect: greetings and signals over the control connection, and where wanted rdma_cm.
#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "transport/ibverbs/engine.h"

namespace rejoin::transport::ibverbs {

// A rail over Ethernet that has no address of its own, as while its port is down, listens at any port where it is told
// to: at that port it would be in the way of those that have one.
Result<Address> IbverbsEngine::listen(const Address& where) {
  const bool as_ever = device_ && (!device_->ethernet() || !device_->address().empty());
  if (!options_.one_of_several || as_ever) return control_->listen(where);
  auto beside = control_->listen({where.text.substr(0, where.text.rfind(':')) + ":0"});
  if (beside) logger().warn("rail {}: it has no address of its own now, and listens on {}", name_, beside->text);
  return beside;
}

namespace {

// As many as carry bulk otherwise, beside the first one.
std::uint32_t unordered_of(const Options& options) { return std::max(1u, options.queue_pairs - 1); }

// Of the queue pairs offered, those in use when so many of them are without order.
std::vector<std::size_t> in_use(const wire::Greeting& offer, std::uint32_t unordered) {
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < (unordered > 0 ? 1u : offer.queue_pairs); ++i) which.push_back(i);
  for (std::size_t i = 0; i < unordered; ++i) which.push_back(offer.queue_pairs + i);
  return which;
}

wire::Greeting taken(const wire::Greeting& offer, std::uint32_t unordered) {
  wire::Greeting result = offer;
  std::size_t count = 0;
  for (const std::size_t index : in_use(offer, unordered)) {
    result.numbers[count] = offer.numbers[index];
    result.first_packets[count++] = offer.first_packets[index];
  }
  return result;
}

}  // namespace

Result<> IbverbsEngine::make_room_for_completions(std::uint32_t more_queue_pairs) {
  const auto needed =
      static_cast<int>(options_.receive_buffers + (by_tag_.size() + more_queue_pairs) * options_.queue_depth);
  if (needed <= completions_->cqe) return {};
  const int wanted = std::min(device_->limits().max_cqe, 2 * needed);
  if (const int error = verbs().resize_cq(completions_.get(), wanted); error != 0 || completions_->cqe < needed)
    return fail(ErrorCode::exhausted,
                "rail {}: the completion queue can't grow to {} entries (limit {}): use fewer or "
                "shallower queue pairs (qps=, depth=)",
                name_, needed, device_->limits().max_cqe);
  return {};
}

Result<> IbverbsEngine::make_queue_pairs(Endpoint& endpoint, std::uint32_t ordered, std::uint32_t unordered) {
  const std::uint32_t count = ordered + unordered;
  endpoint.rebuilding.resize(count);
  if (auto room = make_room_for_completions(count); !room) return room;
  for (std::uint32_t i = 0; i < count; ++i) {
    do next_tag_ = (next_tag_ + 1) & QueuePair::kLargestTag;
    while (next_tag_ == 0 || by_tag_.contains(next_tag_));
    auto made = QueuePair::make({*device_, options_, completions_.get(), receives_.get(), slots_}, next_tag_,
                                i < ordered ? QueuePair::Order::kept : QueuePair::Order::none);
    if (!made) {
      destroy_queue_pairs(endpoint);
      return tl::unexpected(made.error());
    }
    by_tag_[next_tag_] = by_number_[(*made)->number()] = {&endpoint, i};
    endpoint.queue_pairs.push_back(std::move(*made));
  }
  return {};
}

// The others are of no use: nothing was ever posted on them.
void IbverbsEngine::keep_queue_pairs(Endpoint& endpoint, const std::vector<std::size_t>& which) {
  std::vector<std::unique_ptr<QueuePair>> kept;
  for (const std::size_t index : which) kept.push_back(std::move(endpoint.queue_pairs[index]));
  for (const auto& queue_pair : endpoint.queue_pairs) {
    if (!queue_pair) continue;
    by_tag_.erase(queue_pair->tag());
    by_number_.erase(queue_pair->number());
  }
  endpoint.queue_pairs = std::move(kept);
  endpoint.rebuilding.assign(endpoint.queue_pairs.size(), false);
  for (std::size_t i = 0; i < endpoint.queue_pairs.size(); ++i)
    by_tag_[endpoint.queue_pairs[i]->tag()] = by_number_[endpoint.queue_pairs[i]->number()] = {&endpoint, i};
}

wire::Greeting IbverbsEngine::greeting(const Endpoint& endpoint) const {
  wire::Greeting greeting;
  std::memcpy(greeting.gid, device_->gid().raw, sizeof greeting.gid);
  greeting.lid = device_->port().lid;
  greeting.mtu = options_.mtu != 0 ? options_.mtu : 128u << device_->port().active_mtu;
  for (std::size_t i = 0; i < endpoint.queue_pairs.size(); ++i) {
    ++(endpoint.queue_pairs[i]->ordered() ? greeting.queue_pairs : greeting.unordered);
    greeting.numbers[i] = endpoint.queue_pairs[i]->number();
    greeting.first_packets[i] = endpoint.queue_pairs[i]->first_packet();
  }
  greeting.by_manager = endpoint.by_manager;
  greeting.manager_token = endpoint.manager_token;
  if (endpoint.by_manager && !endpoint.initiator) {
    greeting.manager_port = manager_->port();
    manager_->address().copy(greeting.manager_address, sizeof greeting.manager_address - 1);
  }
  return greeting;
}

Result<EndpointId> IbverbsEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello, kMaxHello - sizeof(wire::Greeting)); !checked)
    return tl::unexpected(checked.error());
  if (auto there = ready(); !there) return tl::unexpected(there.error());
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->initiator = endpoint->announced = true;
  endpoint->by_manager = options_.connection_manager.has_value();
  if (endpoint->by_manager)
    if (auto there = start_manager(); !there) return tl::unexpected(there.error());
  if (auto made = make_queue_pairs(*endpoint, options_.queue_pairs, out_of_order_ ? unordered_of(options_) : 0); !made)
    return tl::unexpected(made.error());
  auto id = control_->connect(peer, joined(greeting(*endpoint), hello));
  if (!id) {
    destroy_queue_pairs(*endpoint);
    return tl::unexpected(id.error());
  }
  endpoint->id = *id;
  ++unopened_;
  endpoints_[id->value] = std::move(endpoint);
  return *id;
}

QueuePair::Peer IbverbsEngine::peer_of(const Endpoint& endpoint, std::size_t queue_pair,
                                       std::uint32_t first_packet) const {
  return {.gid = endpoint.peer_gid,
          .lid = endpoint.peer_lid,
          .mtu = endpoint.peer_mtu,
          .number = endpoint.peer_numbers[queue_pair],
          .first_packet = first_packet};
}

// rdma_cm, from the first endpoint on that is connected by it.
Result<> IbverbsEngine::start_manager() {
  if (manager_) return {};
  std::string address = options_.connection_manager.value_or("");
  if (address.empty()) address = device_->address();
  if (address.empty())
    return fail(ErrorCode::invalid_argument,
                "rail {}: its GID stands for no IPv4 address; give rdma_cm the address of its interface, as in "
                "{};cm=192.168.1.1",
                name_, options_.device);
  auto manager = ConnectionManager::start(address);
  if (!manager) return fail(manager.error().code, "rail {}: {}", name_, manager.error().message);
  manager_ = std::move(*manager);
  return add_to(epoll_, manager_->fd());
}

Result<> IbverbsEngine::connect_queue_pairs(Endpoint& endpoint, const wire::Greeting& peer, bool may_post) {
  std::memcpy(endpoint.peer_gid.raw, peer.gid, sizeof peer.gid);
  endpoint.peer_lid = peer.lid;
  endpoint.peer_mtu = peer.mtu;
  const auto count = static_cast<std::uint32_t>(endpoint.queue_pairs.size());
  endpoint.peer_numbers.assign(peer.numbers, peer.numbers + count);
  if (endpoint.by_manager) {
    endpoint.uncalled = count;
    for (std::uint32_t i = 0; endpoint.initiator && i < count; ++i) {
      const std::string address(peer.manager_address, ::strnlen(peer.manager_address, sizeof peer.manager_address));
      auto called = manager_->call({endpoint.id, i}, address, peer.manager_port, peer.manager_token,
                                   endpoint.queue_pairs[i]->number(), options_);
      if (!called) return called;
    }
    return {};
  }
  for (std::size_t i = 0; i < endpoint.queue_pairs.size(); ++i)
    if (auto connected = endpoint.queue_pairs[i]->connect(peer_of(endpoint, i, peer.first_packets[i]), may_post);
        !connected)
      return connected;
  return {};
}

void IbverbsEngine::on_accepted(const Event& event) {
  BytesView bytes = event.message;
  wire::Greeting theirs;
  const bool sound = take(bytes, theirs) && theirs.magic == wire::kMagic && theirs.queue_pairs >= 1 &&
                     theirs.queue_pairs <= wire::kMaxQueuePairs && theirs.unordered <= wire::kMaxQueuePairs;
  if (!sound) {
    refusals::count(refusals::Why::protocol);
    logger().warn("rail {}: a connection was refused: it sent something other than a verbs greeting of this version",
                  name_);
    return control_->close(event.endpoint);
  }
  auto made = std::make_unique<Endpoint>();
  Endpoint& endpoint = *made;
  endpoint.id = event.endpoint;
  endpoint.stage = Stage::accepting;
  endpoint.hello.assign(bytes.begin(), bytes.end());
  endpoint.by_manager = theirs.by_manager != 0;
  Result<> result = ready();
  if (result && endpoint.by_manager) result = start_manager();
  const std::uint32_t unordered = out_of_order_ ? theirs.unordered : 0;
  if (result) result = make_queue_pairs(endpoint, unordered > 0 ? 1 : theirs.queue_pairs, unordered);
  if (result) result = connect_queue_pairs(endpoint, taken(theirs, unordered), false);
  if (!result) {
    if (const auto before = refused_.may_say(clock_.now()))
      logger().warn("rail {}: a connection was refused: {}{}", name_, result.error(),
                    *before > 0 ? fmt::format("; so were {} since this was last logged", *before) : "");
    destroy_queue_pairs(endpoint);
    return control_->close(event.endpoint);
  }
  ++unopened_;
  if (endpoint.by_manager) by_token_[endpoint.manager_token = unguessable_.next()] = endpoint.id;
  endpoints_[endpoint.id.value] = std::move(made);
  const wire::Greeting ours = greeting(endpoint);
  (void)control_->send(endpoint.id, bytes_of(ours));  // a failure shows as `closed`
}

void IbverbsEngine::on_greeting(Endpoint& endpoint, BytesView message) {
  wire::Greeting theirs;
  const wire::Greeting offer = greeting(endpoint);
  const bool sound = take(message, theirs) && theirs.magic == wire::kMagic && endpoint.uncalled == 0;
  const bool in_order = theirs.unordered == 0 && theirs.queue_pairs == offer.queue_pairs;
  const bool out_of_order = theirs.unordered != 0 && theirs.unordered == offer.unordered && theirs.queue_pairs == 1;
  if (!sound || (!in_order && !out_of_order))
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it is no verbs engine of this version");
  keep_queue_pairs(endpoint, in_use(offer, theirs.unordered));
  if (auto connected = connect_queue_pairs(endpoint, theirs, true); !connected)
    return fail_endpoint(endpoint, connected.error().code, connected.error().message);
  if (endpoint.uncalled == 0) on_all_connected(endpoint);
}

void IbverbsEngine::on_all_connected(Endpoint& endpoint) {
  send_signal(endpoint, 0, wire::Signal::ready);
  --unopened_;
  endpoint.stage = Stage::open;
  events_.emit({.kind = EventKind::connected, .endpoint = endpoint.id});
}

void IbverbsEngine::on_manager(const ConnectionManager::Event& event) {
  using Kind = ConnectionManager::Event::Kind;
  EndpointId id = event.mine.endpoint;
  if (event.kind == Kind::called)
    if (auto meant = by_token_.find(event.token); meant != by_token_.end()) id = meant->second;
  Endpoint* endpoint = find(id);
  if (endpoint == nullptr || endpoint->stage == Stage::failed) {
    if (event.kind == Kind::failed) logger().warn("rail {}: {}", name_, event.why);
    return manager_->refuse(event);
  }
  if (event.kind == Kind::failed) return fail_endpoint(*endpoint, ErrorCode::unavailable, event.why);
  const auto give_up = [&](ErrorCode code, const std::string& why) {
    if (event.kind == Kind::called) manager_->refuse(event);  // with its endpoint only what was accepted is forgotten
    fail_endpoint(*endpoint, code, why);
  };
  if (endpoint->uncalled == 0 || event.mine.index >= endpoint->queue_pairs.size())
    return give_up(ErrorCode::corrupt, "it called by rdma_cm once too often");
  --endpoint->uncalled;
  QueuePair& queue_pair = *endpoint->queue_pairs[event.mine.index];
  Result<> result = queue_pair.set_path(event.path);
  if (result)
    result = queue_pair.connect(peer_of(*endpoint, event.mine.index, event.path.receive.rq_psn), endpoint->initiator);
  if (result)
    result = endpoint->initiator ? manager_->establish(event)
                                 : manager_->accept(event, endpoint->id, queue_pair.number(), options_);
  if (!result) return give_up(result.error().code, result.error().message);
  if (endpoint->initiator && endpoint->uncalled == 0) on_all_connected(*endpoint);
}

// The peer can receive: its answer or its first message has come.
void IbverbsEngine::opened(Endpoint& endpoint) {
  if (endpoint.stage != Stage::accepting) return;
  --unopened_;
  endpoint.stage = Stage::open;
  endpoint.announced = true;
  for (auto& queue_pair : endpoint.queue_pairs) queue_pair->resume();
  events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, std::exchange(endpoint.hello, {}));
  touch(endpoint);
}

void IbverbsEngine::send_signal(Endpoint& endpoint, std::size_t index, wire::Signal signal) {
  const QueuePair& queue_pair = *endpoint.queue_pairs[index];
  const wire::Control control{.signal = signal,
                              .queue_pair = static_cast<std::uint32_t>(index),
                              .first_packet = queue_pair.first_packet(),
                              .received = queue_pair.received};
  (void)control_->send(endpoint.id, bytes_of(control));  // a failure shows as `closed`
}

void IbverbsEngine::on_signal(Endpoint& endpoint, BytesView message) {
  wire::Control control;
  if (!take(message, control) || control.queue_pair >= endpoint.queue_pairs.size())
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a signal that can't be");
  const std::size_t index = control.queue_pair;
  QueuePair& queue_pair = *endpoint.queue_pairs[index];
  const auto done = [&](const Work& work) { on_done(endpoint, work); };
  Result<> result;
  switch (control.signal) {
    case wire::Signal::ready: return opened(endpoint);
    case wire::Signal::rebuild:
      // Both began at once: the side that connected goes first, and the other answers it.
      if (endpoint.rebuilding[index] && endpoint.initiator) return;
      if (!endpoint.rebuilding[index]) result = reset(endpoint, index);
      if (endpoint.stage == Stage::failed) return;
      endpoint.rebuilding[index] = false;
      queue_pair.forget_sends_below(control.received, done);
      if (result) result = queue_pair.connect(peer_of(endpoint, index, control.first_packet), false);
      if (result) send_signal(endpoint, index, wire::Signal::rebuilt);
      break;
    case wire::Signal::rebuilt:
      if (!endpoint.rebuilding[index])
        return fail_endpoint(endpoint, ErrorCode::corrupt, "it rebuilt what was not broken");
      endpoint.rebuilding[index] = false;
      queue_pair.forget_sends_below(control.received, done);
      result = queue_pair.connect(peer_of(endpoint, index, control.first_packet), true);
      if (result) send_signal(endpoint, index, wire::Signal::go);
      touch(endpoint);
      break;
    case wire::Signal::go:
      queue_pair.resume();
      touch(endpoint);
      break;
    default: return fail_endpoint(endpoint, ErrorCode::corrupt, "it sent an unknown signal");
  }
  if (!result) fail_endpoint(endpoint, result.error().code, result.error().message);
}

void IbverbsEngine::on_control(const Event& event) {
  if (event.kind == EventKind::accepted) return on_accepted(event);
  Endpoint* endpoint = find(event.endpoint);
  if (endpoint == nullptr || endpoint->stage == Stage::failed) return;
  if (event.kind == EventKind::closed) {
    take_all_completions();  // what it sent before it went
    poll_completions();
    if (endpoint = find(event.endpoint); endpoint == nullptr || endpoint->stage == Stage::failed) return;
    return fail_endpoint(*endpoint, ErrorCode::unavailable,
                         event.error ? event.error->message : "it closed the connection");
  }
  if (event.kind != EventKind::message) return;
  if (endpoint->stage == Stage::connecting) return on_greeting(*endpoint, event.message);
  on_signal(*endpoint, event.message);
}

}  // namespace rejoin::transport::ibverbs
