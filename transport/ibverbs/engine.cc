#include "transport/ibverbs/engine.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "base/fail.h"
#include "base/log.h"
#include "transport/ibverbs/out_of_order.h"
#include "transport/tcp/factory.h"

namespace rejoin::transport::ibverbs {

namespace {

constexpr std::uint32_t kSendSlots = 256;
constexpr std::uint32_t kControlEvery = 256;  // polls between two looks at the control connections while busy
// A device says within microseconds that a queue pair has received its last; older kernels' soft-RoCE never does.
constexpr auto kDraining = std::chrono::milliseconds(10);

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(const Options& options) { return IbverbsEngine::make(options); }

Result<std::unique_ptr<Engine>> IbverbsEngine::make(const Options& options) {
  std::unique_ptr<IbverbsEngine> engine(new IbverbsEngine(options));
  if (auto started = engine->start(); !started) return tl::unexpected(started.error());
  return engine;
}

Result<> IbverbsEngine::start() {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return fail_errno("epoll_create1");
  // The address may come late, or be changed.
  auto control = tcp::make_engine({.local_now = [this] { return device_ ? device_->address() : std::string(); },
                                   .one_of_several = options_.one_of_several});
  if (!control) return tl::unexpected(control.error());
  control_ = std::move(*control);
  if (auto added = add_to(epoll_, control_->event_fd()); !added) return added;
  const auto there = ready();
  return options_.one_of_several ? Result<>() : there;
}

Result<> IbverbsEngine::open_device() {
  auto device = Device::open(options_);
  if (!device) return tl::unexpected(device.error());
  device_ = std::move(*device);
  if (options_.out_of_order) {
    const auto why_not = why_not_out_of_order(device_->context());
    if (!why_not.empty()) logger().info("rail {}: data is placed in order: {}", name_, why_not);
    out_of_order_ = why_not.empty();
  }
  channel_ = CompletionChannel(verbs().create_comp_channel(device_->context()));
  if (!channel_) return fail_errno("ibv_create_comp_channel");
  const int entries = static_cast<int>(options_.receive_buffers + 4 * options_.queue_depth);
  completions_ = CompletionQueue(
      verbs().create_cq(device_->context(), std::min(entries, device_->limits().max_cqe), nullptr, channel_.get(), 0));
  if (!completions_) return fail_errno(fmt::format("rail {}: a completion queue of {}", name_, entries));
  ibv_srq_init_attr shared{};
  shared.attr.max_wr = options_.receive_buffers;
  shared.attr.max_sge = 1;
  receives_ = SharedReceiveQueue(verbs().create_srq(device_->domain(), &shared));
  if (!receives_) return fail_errno(fmt::format("rail {}: a shared receive queue", device_->name()));
  receive_memory_.resize(options_.receive_buffers * SendSlots::kBytes);
  auto region = device_->register_memory(receive_memory_, MemoryKind::host, Access::local);
  if (!region) return tl::unexpected(region.error());
  receive_region_ = std::move(*region);
  unposted_.clear();
  for (std::uint32_t i = 0; i < options_.receive_buffers; ++i) unposted_.push_back(i);
  if (auto filled = fill_receives(); !filled) return filled;
  if (auto made = slots_.make(*device_, kSendSlots); !made) return made;
  for (int fd : {channel_->fd, device_->context()->async_fd}) {
    if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) return fail_errno("fcntl");
    if (auto added = add_to(epoll_, fd); !added) return added;
  }
  for (auto& [id, registered] : registered_) {
    const Region& known = *regions_.find(RegionId(id));
    if (auto again = register_with_device(known.memory, known.access, registered); !again) return again;
  }
  return {};
}

// The endpoints have failed before; what is left is given up in the order of its making, backwards.
void IbverbsEngine::lose_device() {
  lost_ = true;
  known_to_.clear();
  if (channel_) remove_from(epoll_, channel_->fd);
  if (device_) remove_from(epoll_, device_->context()->async_fd);
  if (manager_) remove_from(epoll_, manager_->fd());
  if (removal_) remove_from(epoll_, removal_->fd());
  for (auto& [id, registered] : registered_) registered.region.reset();
  slots_.reset();
  receives_.reset();
  receive_region_.reset();
  if (unacknowledged_ > 0) verbs().ack_cq_events(completions_.get(), std::exchange(unacknowledged_, 0));
  backlog_ = {};
  device_events_ = {};
  completions_.reset();
  channel_.reset();
  manager_.reset();
  device_.reset();
  removal_.reset();
}

Result<> IbverbsEngine::ready() {
  if (!device_) {
    if (auto opened = open_device(); !opened) {
      lose_device();
      return opened;
    }
    if (std::exchange(lost_, false)) logger().info("rail {}: the device is there again", name_);
  }
  if (auto up = device_->refresh(); !up) return up;
  return watch_removal();
}

Result<> IbverbsEngine::watch_removal() {
  std::string address = device_->address();
  if (removal_ && removal_of_ == address) return {};
  if (removal_) remove_from(epoll_, removal_->fd());
  removal_ = RemovalWatch::start(address);
  removal_of_ = std::move(address);
  return removal_ ? add_to(epoll_, removal_->fd()) : Result<>();
}

IbverbsEngine::~IbverbsEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
  if (unacknowledged_ > 0) verbs().ack_cq_events(completions_.get(), unacknowledged_);
}

// ---- regions

Result<RegionId> IbverbsEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  return keep(memory, access, {.region = {}, .kind = kind, .dma_buf = {}});
}

Result<RegionId> IbverbsEngine::register_dma_buf(const DmaBuf& buffer, Access access) {
  auto fd = duplicate(buffer.fd);
  if (!fd) return fail(fd.error().code, "rail {}: a dma-buf: {}", name_, fd.error().message);
  return keep(buffer.memory, access,
              {.region = {}, .kind = MemoryKind::cuda, .dma_buf = std::move(*fd), .dma_buf_offset = buffer.offset});
}

// Without the device: it is registered when that is back.
Result<RegionId> IbverbsEngine::keep(std::span<std::byte> memory, Access access, Registered what) {
  if (device_)
    if (auto registered = register_with_device(memory, access, what); !registered)
      return tl::unexpected(registered.error());
  const RegionId id = regions_.add(memory, access);
  what.address = reinterpret_cast<std::uint64_t>(memory.data());
  registered_[id.value] = std::move(what);
  return id;
}

Result<> IbverbsEngine::register_with_device(std::span<std::byte> memory, Access access, Registered& what) const {
  auto region = what.dma_buf ? device_->register_dma_buf(
                                   {.fd = what.dma_buf.get(), .offset = what.dma_buf_offset, .memory = memory}, access)
                             : device_->register_memory(memory, what.kind, access);
  if (!region) return tl::unexpected(region.error());
  what.region = std::move(*region);
  return {};
}

void IbverbsEngine::deregister(RegionId id) {
  auto registered = registered_.extract(id.value);
  if (registered.empty()) return;
  const std::uint64_t key = regions_.remote(id).key;
  regions_.remove(id);
  if (const auto& region = registered.mapped().region)
    for (auto& [number, endpoint] : endpoints_)
      for (auto& queue_pair : endpoint->queue_pairs) queue_pair->withdraw(region->lkey);
  // Those who know it are told, so that they ask again, and are refused, instead of breaking a queue pair.
  if (auto known = known_to_.extract(id.value); !known.empty())
    for (auto endpoint : known.mapped())
      if (Endpoint* peer = find(endpoint); peer != nullptr && peer->stage == Stage::open)
        send_control(*peer, {.kind = wire::Kind::withdraw, .a = key});
}

// ---- events of the device and the control connection

void IbverbsEngine::look_at_control() {
  for (const auto& event : control_->poll()) on_control(event);
  if (manager_)
    for (const auto& event : manager_->poll()) on_manager(event);
  look_at_device();
}

// Events are acknowledged at once: no queue pair can be destroyed while one of its own is not.
void IbverbsEngine::take_device_events() {
  ibv_async_event event{};
  while (verbs().get_async_event(device_->context(), &event) == 0) {
    DeviceEvent taken{.type = event.event_type, .endpoint = {}};
    if (taken.type == IBV_EVENT_QP_FATAL || taken.type == IBV_EVENT_QP_LAST_WQE_REACHED) {
      if (auto owner = by_number_.find(event.element.qp->qp_num); owner != by_number_.end()) {
        taken.endpoint = owner->second.endpoint->id;
        if (taken.type == IBV_EVENT_QP_LAST_WQE_REACHED)
          owner->second.endpoint->queue_pairs[owner->second.index]->on_last_receive();
      }
    }
    // Whoever has a device open hears of all its ports.
    const bool elsewhere = taken.type == IBV_EVENT_PORT_ERR && event.element.port_num != device_->port_number();
    verbs().ack_async_event(&event);
    if (taken.type != IBV_EVENT_QP_LAST_WQE_REACHED && !elsewhere) device_events_.push_back(taken);
  }
}

// A port that goes down or a device that goes away ends what runs over it; a queue pair's own error ends its endpoint,
// but for the refusals that the completion tells better.
void IbverbsEngine::look_at_device() {
  if (!device_) return;
  bool fatal = removal_ && removal_->removed();
  if (fatal) fail_all(fmt::format("rail {}: the device is being removed", name_));
  for (take_device_events(); !device_events_.empty();) {
    const auto [type, about] = device_events_.pop_front();
    Endpoint* one = type == IBV_EVENT_QP_FATAL ? find(about) : nullptr;
    if (type == IBV_EVENT_QP_ACCESS_ERR)
      regions_.count(Regions::Refusal::bad_key);  // of which kind, only the NIC knows
    // A queue in error stays so: as with the device itself, all is opened anew when a connection is next tried.
    const bool lost = type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR || type == IBV_EVENT_SRQ_ERR;
    fatal = fatal || lost;
    const std::string why = fmt::format("rail {}: {}", name_, verbs().event_type_str(type));
    if (lost || type == IBV_EVENT_PORT_ERR) {
      fail_all(why);
    } else if (one != nullptr) {
      logger().warn("{}", why);
      fail_endpoint(*one, ErrorCode::unavailable, why);
    }
  }
  if (fatal) lose_device();
}

void IbverbsEngine::fail_all(const std::string& why) {
  logger().warn("{}", why);
  for (auto& [id, endpoint] : endpoints_) fail_endpoint(*endpoint, ErrorCode::unavailable, why);
}

// ---- closing

// Stops queue pairs and takes all completions, theirs and others', into the backlog. See "Queue pairs" in
// docs/design-notes.md for why that comes before they are reset or destroyed.
void IbverbsEngine::drain(std::span<const std::unique_ptr<QueuePair>> queue_pairs) {
  for (const auto& queue_pair : queue_pairs) queue_pair->stop();
  const auto deadline = std::chrono::steady_clock::now() + kDraining;
  bool receiving = false;
  do {
    take_device_events();
    receiving = std::any_of(queue_pairs.begin(), queue_pairs.end(), [](const auto& one) { return one->receiving(); });
    take_all_completions();
  } while (receiving && std::chrono::steady_clock::now() < deadline);
}

void IbverbsEngine::destroy_queue_pairs(Endpoint& endpoint) {
  if (endpoint.queue_pairs.empty()) return;
  drain(endpoint.queue_pairs);
  // Nothing of them is left when their numbers are used again.
  backlog_.erase_if([&](const ibv_wc& completion) {
    const auto owner = by_number_.find(completion.qp_num);
    if (owner == by_number_.end() || owner->second.endpoint != &endpoint) return false;
    if (QueuePair::tag_of(completion.wr_id) == 0) unposted_.push_back(static_cast<std::uint32_t>(completion.wr_id));
    return true;
  });
  for (const auto& queue_pair : endpoint.queue_pairs) {
    by_tag_.erase(queue_pair->tag());
    by_number_.erase(queue_pair->number());
  }
  endpoint.queue_pairs.clear();
  if (manager_ && endpoint.by_manager) manager_->forget(endpoint.id);
  by_token_.erase(endpoint.manager_token);
  for (auto& [region, known] : known_to_) known.erase(endpoint.id);
}

void IbverbsEngine::end_operations(Endpoint& endpoint, const Error& error) {
  for (const auto& operation : endpoint.operations.remove_all())
    events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = operation.context, .error = error});
}

void IbverbsEngine::fail_endpoint(Endpoint& endpoint, ErrorCode code, const std::string& why) {
  if (endpoint.stage == Stage::failed) return;
  const Stage before = std::exchange(endpoint.stage, Stage::failed);
  endpoint.failure = why;
  if (before != Stage::open) --unopened_;
  control_->close(endpoint.id);
  destroy_queue_pairs(endpoint);
  const Error error{code, fmt::format("the peer is gone: {}", why)};
  end_operations(endpoint, error);
  if (endpoint.announced) events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
  else touch(endpoint);  // nobody knows of it: flush() removes it
}

void IbverbsEngine::close(EndpointId id) {
  auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return;
  auto endpoint = std::move(found->second);
  endpoints_.erase(found);
  if (endpoint->stage == Stage::connecting || endpoint->stage == Stage::accepting) --unopened_;
  if (endpoint->stage == Stage::open) {
    for (auto& queue_pair : endpoint->queue_pairs) (void)queue_pair->post();
  }
  control_->close(id);
  destroy_queue_pairs(*endpoint);
  end_operations(*endpoint, {ErrorCode::cancelled, "the endpoint was closed"});
}

bool IbverbsEngine::arm() {
  if (!events_.empty() || !dirty_.empty() || !backlog_.empty() || !device_events_.empty()) return false;
  if (!control_->arm()) return false;
  if (!device_) return true;
  if (ibv_req_notify_cq(completions_.get(), 0) != 0) return false;
  // What completed before the request would ring nobody.
  ibv_wc completion{};
  slept_ = true;
  if (ibv_poll_cq(completions_.get(), 1, &completion) <= 0) return true;
  backlog_.push_back(completion);
  return false;
}

std::span<const Event> IbverbsEngine::poll() {
  if (std::exchange(slept_, false) && device_) {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    while (verbs().get_cq_event(channel_.get(), &queue, &context) == 0)
      if (++unacknowledged_ == 64) verbs().ack_cq_events(completions_.get(), std::exchange(unacknowledged_, 0));
    look_at_control();
  } else if (++polls_ % kControlEvery == 0 || unopened_ > 0 || endpoints_.empty()) {
    look_at_control();
  }
  poll_completions();
  flush();
  return events_.take();
}

}  // namespace rejoin::transport::ibverbs
