// Sending, receiving, completing: everything that runs per message.
#include "transport/ucx/engine.h"

namespace rejoin::transport::ucx {

namespace {

constexpr std::size_t kMostEarly = 1024;   // messages of one peer that overtook others
constexpr std::size_t kReceiveBatch = 64;  // UCX progress calls a poll, so that poll() stays short under load

std::byte* bytes(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

}  // namespace

// The entry of every active message: checks its header's size and hands it to the function of its kind.
template <wire::Kind kind, typename Header>
ucs_status_t UcxEngine::receive(void* arg, const void* raw, std::size_t raw_size, void* data, std::size_t size,
                                const ucp_am_recv_param_t* param) {
  auto& engine = *static_cast<UcxEngine*>(arg);
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  constexpr bool bulk = kind == wire::write || kind == wire::read_data;
  Header header;
  if (raw_size != sizeof header || (rendezvous && !bulk)) return engine.drop();
  std::memcpy(&header, raw, sizeof header);
  [[maybe_unused]] const BytesView body{bytes(data), size};
  if constexpr (kind == wire::call) return engine.on_call(header, body);
  else if constexpr (kind == wire::challenge) return engine.on_challenge(header);
  else if constexpr (kind == wire::hello) return engine.on_hello(header, body);
  else if constexpr (kind == wire::welcome) return engine.on_welcome(header);
  else if constexpr (kind == wire::goodbye) return engine.on_goodbye(header);
  else if constexpr (kind == wire::message) return engine.on_message(header, body);
  else if constexpr (kind == wire::write) return engine.on_write(header, data, size, rendezvous);
  else if constexpr (kind == wire::acknowledge) return engine.on_acknowledge(header);
  else if constexpr (kind == wire::read_request) return engine.on_read_request(header);
  else return engine.on_read_data(header, data, size, rendezvous);
}

#define REJOIN_RECEIVE(kind, Header)                                                                         \
  template ucs_status_t UcxEngine::receive<wire::kind, wire::Header>(void*, const void*, std::size_t, void*, \
                                                                     std::size_t, const ucp_am_recv_param_t*)
REJOIN_RECEIVE(call, Call);
REJOIN_RECEIVE(challenge, Challenge);
REJOIN_RECEIVE(hello, Hello);
REJOIN_RECEIVE(welcome, Welcome);
REJOIN_RECEIVE(goodbye, Goodbye);
REJOIN_RECEIVE(message, Message);
REJOIN_RECEIVE(write, Write);
REJOIN_RECEIVE(acknowledge, Acknowledge);
REJOIN_RECEIVE(read_request, ReadRequest);
REJOIN_RECEIVE(read_data, ReadData);
#undef REJOIN_RECEIVE

std::span<const Event> UcxEngine::poll() {
  for (std::size_t i = 0; i < kReceiveBatch && ucx().worker_progress(worker_) != 0; ++i) {
    if (!events_.empty()) break;
  }
  for (const auto& [call, address] : std::exchange(calls_, {})) take_call(call, address);
  look_after_strangers();
  if (!errors_.empty() || !endings_.empty()) report_failures();
  return events_.take();
}

// ---- messages

UcxEngine::Outgoing& UcxEngine::new_outgoing() {
  if (free_outgoing_.empty()) {
    outgoing_.emplace_back().engine = this;
    return outgoing_.back();
  }
  Outgoing& out = *free_outgoing_.back();
  free_outgoing_.pop_back();
  return out;
}

void UcxEngine::on_outgoing_sent(void* request, ucs_status_t, void* outgoing) {
  auto& out = *static_cast<Outgoing*>(outgoing);
  if (Region* region = out.engine->regions_.find(std::exchange(out.region, RegionId{}))) --region->busy;
  if (Endpoint* endpoint = out.engine->find(out.endpoint.value)) endpoint->unsent.remove(out.counted);
  out.engine->free_outgoing_.push_back(&out);
  if (request != nullptr) ucx().request_free(request);
}

// A send that fails takes its endpoint down through UCX's error callback, so only its buffer needs care here.
void UcxEngine::post(Endpoint& endpoint, unsigned kind, Outgoing& out, std::size_t header_size, BytesView payload,
                     std::uint32_t flags) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = &UcxEngine::on_outgoing_sent;
  param.user_data = &out;
  param.flags = flags;
  out.endpoint = endpoint.id;
  out.counted = sizeof out + out.payload.size();
  endpoint.unsent.add(out.counted);
  void* request =
      ucx().am_send_nbx(endpoint.handle, kind, &out.call, header_size, payload.data(), payload.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  if (UCS_PTR_IS_ERR(request)) errors_.emplace_back(endpoint.handle, UCS_PTR_STATUS(request));
  on_outgoing_sent(nullptr, UCS_OK, &out);
}

// Not at once: UCX may be calling.
void UcxEngine::check_unsent(const Endpoint& endpoint) {
  if (endpoint.unsent.over()) endings_.push_back({endpoint.id, ErrorCode::exhausted, Unsent::why()});
}

Result<> UcxEngine::send(EndpointId id, BytesView message) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  Outgoing& out = new_outgoing();
  out.message = {(*endpoint)->peer, (*endpoint)->next_to_send++};
  out.payload.assign(message.begin(), message.end());
  post(**endpoint, wire::message, out, sizeof out.message, out.payload, UCP_AM_SEND_FLAG_EAGER);
  check_unsent(**endpoint);
  return {};
}

ucs_status_t UcxEngine::on_message(const wire::Message& header, BytesView data) {
  Endpoint* endpoint = find(header.to);
  if (endpoint == nullptr || endpoint->stage != Stage::open || header.sequence < endpoint->next_to_deliver)
    return drop();
  if (header.sequence != endpoint->next_to_deliver) {  // UCX orders only messages of one protocol
    endpoint->early.emplace(header.sequence, Bytes(data.begin(), data.end()));
    if (endpoint->early.size() > kMostEarly)
      endings_.push_back({endpoint->id, ErrorCode::corrupt, "it sent messages far ahead of others"});
    return UCS_OK;
  }
  deliver(*endpoint, data);
  for (auto it = endpoint->early.begin(); it != endpoint->early.end() && it->first == endpoint->next_to_deliver;
       it = endpoint->early.erase(it))
    deliver(*endpoint, it->second);
  return UCS_OK;
}

void UcxEngine::deliver(Endpoint& endpoint, BytesView message) {
  ++endpoint.next_to_deliver;
  events_.emit({.kind = EventKind::message, .endpoint = endpoint.id}, message);
}

// ---- operations

UcxEngine::Operation& UcxEngine::new_operation(EndpointId endpoint, std::uint64_t context, RegionId region) {
  if (free_operations_.empty()) {
    const auto slot = static_cast<std::uint32_t>(operations_.size());
    operations_.emplace_back().id = slot;
    free_operations_.push_back(slot);
  }
  Operation& operation = operations_[free_operations_.back()];
  free_operations_.pop_back();
  operation.engine = this;
  operation.id += std::uint64_t{1} << 32;
  operation.endpoint = endpoint;
  operation.context = context;
  operation.local_done = operation.reported = operation.acknowledged = false;
  operation.refusal = Regions::Refusal::none;
  operation.target = nullptr;
  operation.region = region;
  return operation;
}

UcxEngine::Operation* UcxEngine::find_operation(std::uint64_t id) {
  const auto slot = static_cast<std::uint32_t>(id);
  if (slot >= operations_.size() || operations_[slot].id != id || operations_[slot].reported) return nullptr;
  return &operations_[slot];
}

void UcxEngine::report(Operation& operation, std::optional<Error> error) {
  operation.reported = true;
  events_.emit({.kind = EventKind::completed,
                .endpoint = operation.endpoint,
                .value = operation.context,
                .error = std::move(error)});
  settle(operation);
}

// Reports a finished operation, and frees the slot once UCX holds nothing of it.
void UcxEngine::settle(Operation& operation) {
  if (!operation.reported && operation.local_done && operation.acknowledged)
    return report(operation, refusal_error(operation.refusal));
  if (operation.reported && operation.local_done) free_operations_.push_back(static_cast<std::uint32_t>(operation.id));
}

Result<> UcxEngine::write(EndpointId id, std::span<const Write> writes) {
  auto endpoint = find_for_posting(endpoints_, regions_, id, writes);
  if (!endpoint) return tl::unexpected(endpoint.error());
  for (const auto& write : writes) {
    const std::byte* source = *regions_.local(write.local, write.length);
    Operation& operation = new_operation(id, write.context, write.local.region);
    operation.header = {(*endpoint)->peer,       operation.id, write.remote.region.key,
                        write.remote.offset,     write.length, write.notify.value_or(0),
                        write.notify.has_value()};
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &UcxEngine::on_sent;
    param.user_data = &operation;
    void* request = ucx().am_send_nbx((*endpoint)->handle, wire::write, &operation.header, sizeof operation.header,
                                      source, write.length, &param);
    if (UCS_PTR_IS_PTR(request)) continue;
    if (UCS_PTR_IS_ERR(request)) errors_.emplace_back((*endpoint)->handle, UCS_PTR_STATUS(request));
    operation.local_done = true;
  }
  return {};
}

void UcxEngine::on_sent(void* request, ucs_status_t, void* user_data) {
  auto& operation = *static_cast<Operation*>(user_data);
  operation.local_done = true;
  ucx().request_free(request);
  operation.engine->settle(operation);
}

ucs_status_t UcxEngine::on_write(const wire::Write& header, void* data, std::size_t size, bool rendezvous) {
  Endpoint* endpoint = find(header.to);
  if (endpoint == nullptr || endpoint->stage != Stage::open) return drop();  // fenced
  auto refusal = regions_.check(header.key, header.offset, header.length, Access::remote_write);
  if (refusal == Regions::Refusal::none && size != header.length) regions_.count(refusal = Regions::Refusal::bad_range);
  if (refusal != Regions::Refusal::none) {
    acknowledge(*endpoint, header.operation, refusal);
    return UCS_OK;
  }
  Region& region = *regions_.by_key(header.key);
  return land({this, endpoint->id, region.id, header, 0, nullptr, {}}, region.memory.data() + header.offset, data, size,
              rendezvous);
}

// Moves arrived bytes to `target`, now or when UCX has fetched them.
ucs_status_t UcxEngine::land(Receive receive, std::byte* target, void* data, std::size_t size, bool rendezvous) {
  ++find(receive.endpoint.value)->receiving;
  if (Region* region = regions_.find(receive.region); region != nullptr && !bounces_) ++region->busy;
  if (!rendezvous) {
    if (size > 0) std::memcpy(target, data, size);
    landed(receive, UCS_OK);
    return UCS_OK;
  }
  auto* kept = new Receive(std::move(receive));
  kept->target = target;
  if (bounces_) kept->bounce.resize(size);
  std::byte* place = bounces_ ? kept->bounce.data() : target;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &UcxEngine::on_landed;
  param.user_data = kept;
  void* request = ucx().am_recv_data_nbx(worker_, data, place, size, &param);
  if (UCS_PTR_IS_PTR(request)) return UCS_INPROGRESS;
  landed(*kept, UCS_PTR_STATUS(request));
  delete kept;
  return UCS_INPROGRESS;
}

void UcxEngine::on_landed(void* request, ucs_status_t status, std::size_t, void* user_data) {
  std::unique_ptr<Receive> receive(static_cast<Receive*>(user_data));
  receive->engine->landed(*receive, status);
  ucx().request_free(request);
}

void UcxEngine::landed(const Receive& receive, ucs_status_t status) {
  Region* region = regions_.find(receive.region);
  if (region != nullptr && !bounces_) --region->busy;
  Endpoint* endpoint = find(receive.endpoint.value);
  if (endpoint == nullptr) return;
  --endpoint->receiving;
  if (endpoint->stage != Stage::open) return;
  if (status != UCS_OK) {
    errors_.emplace_back(endpoint->handle, status);
    return;
  }
  if (region == nullptr) {  // taken back meanwhile; a read of ours has ended by that
    if (receive.read_operation == 0) acknowledge(*endpoint, receive.header.operation, Regions::Refusal::bad_key);
    return;
  }
  if (!receive.bounce.empty()) std::memcpy(receive.target, receive.bounce.data(), receive.bounce.size());
  if (receive.read_operation != 0) {
    if (Operation* operation = find_operation(receive.read_operation)) {
      operation->acknowledged = true;
      settle(*operation);
    }
    return;
  }
  if (receive.header.has_notify)
    events_.emit({.kind = EventKind::written, .endpoint = endpoint->id, .value = receive.header.notify});
  acknowledge(*endpoint, receive.header.operation, Regions::Refusal::none);
}

void UcxEngine::acknowledge(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal) {
  Outgoing& out = new_outgoing();
  out.acknowledge = {endpoint.peer, operation, refusal};
  post(endpoint, wire::acknowledge, out, sizeof out.acknowledge, {}, UCP_AM_SEND_FLAG_EAGER);
  check_unsent(endpoint);
}

ucs_status_t UcxEngine::on_acknowledge(const wire::Acknowledge& header) {
  Endpoint* endpoint = find(header.to);
  Operation* operation = find_operation(header.operation);
  if (endpoint == nullptr || operation == nullptr || operation->endpoint != endpoint->id) return drop();
  operation->acknowledged = true;
  operation->refusal = header.refusal;
  settle(*operation);
  return UCS_OK;
}

// ---- reads: a request, answered with the bytes

Result<> UcxEngine::read(EndpointId id, std::span<const Read> reads) {
  auto endpoint = find_for_posting(endpoints_, regions_, id, reads);
  if (!endpoint) return tl::unexpected(endpoint.error());
  for (const auto& read : reads) {
    Operation& operation = new_operation(id, read.context, read.local.region);
    operation.local_done = true;
    operation.target = *regions_.local(read.local, read.length);
    operation.length = read.length;
    Outgoing& out = new_outgoing();
    out.read_request = {(*endpoint)->peer, operation.id, read.remote.region.key, read.remote.offset, read.length};
    post(**endpoint, wire::read_request, out, sizeof out.read_request, {}, UCP_AM_SEND_FLAG_EAGER);
  }
  return {};
}

ucs_status_t UcxEngine::on_read_request(const wire::ReadRequest& header) {
  Endpoint* endpoint = find(header.to);
  if (endpoint == nullptr || endpoint->stage != Stage::open) return drop();
  const auto refusal = regions_.check(header.key, header.offset, header.length, Access::remote_read);
  if (refusal != Regions::Refusal::none) {
    acknowledge(*endpoint, header.operation, refusal);
    return UCS_OK;
  }
  Region& region = *regions_.by_key(header.key);
  Outgoing& out = new_outgoing();
  out.read_data = {endpoint->peer, header.operation, header.length};
  out.region = region.id;
  ++region.busy;
  post(*endpoint, wire::read_data, out, sizeof out.read_data, region.memory.subspan(header.offset, header.length), 0);
  check_unsent(*endpoint);
  return UCS_OK;
}

ucs_status_t UcxEngine::on_read_data(const wire::ReadData& header, void* data, std::size_t size, bool rendezvous) {
  Endpoint* endpoint = find(header.to);
  Operation* operation = find_operation(header.operation);
  if (endpoint == nullptr || endpoint->stage != Stage::open || operation == nullptr ||
      operation->endpoint != endpoint->id || operation->target == nullptr || operation->length != size)
    return drop();
  return land({this, endpoint->id, operation->region, {}, operation->id, nullptr, {}}, operation->target, data, size,
              rendezvous);
}

}  // namespace rejoin::transport::ucx
