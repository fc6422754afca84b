// Connecting, accepting, failing and closing.
#include <chrono>

#include "base/fail.h"
#include "transport/ucx/address.h"
#include "transport/ucx/engine.h"

namespace rejoin::transport::ucx {

Result<UcxEngine::Endpoint*> UcxEngine::adopt(BytesView address, Stage stage) {
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->id = EndpointId(unguessable_.next());
  endpoint->stage = stage;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&UcxEngine::on_error, this};
  if (auto status = ucx().ep_create(worker_, &params, &endpoint->handle); status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX can't reach the peer over '{}': {}", options_.transports,
                ucx().status_string(status));
  Endpoint* adopted = endpoint.get();
  by_handle_[adopted->handle] = adopted;
  endpoints_[adopted->id.value] = std::move(endpoint);
  return adopted;
}

Result<EndpointId> UcxEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello); !checked) return tl::unexpected(checked.error());
  auto address = parse_address(peer.text);
  if (!address) return tl::unexpected(address.error());
  auto endpoint = adopt(*address, Stage::connecting);
  if (!endpoint) return tl::unexpected(endpoint.error());
  Outgoing& out = new_outgoing();
  out.hello = {wire::kMagic, (*endpoint)->id.value, 0, address_.size()};
  out.payload = address_;
  out.payload.insert(out.payload.end(), hello.begin(), hello.end());
  post(**endpoint, wire::hello, out, sizeof out.hello, out.payload, UCP_AM_SEND_FLAG_EAGER);
  return (*endpoint)->id;
}

ucs_status_t UcxEngine::on_hello(const wire::Hello& hello, BytesView body) {
  const bool sound = hello.magic == wire::kMagic && body.size() <= 16 * KiB && hello.address_length <= body.size();
  if (sound && listening_) hellos_.emplace_back(hello, Bytes(body.begin(), body.end()));
  else ++stale_dropped_;
  return UCS_OK;
}

void UcxEngine::accept(const wire::Hello& hello, BytesView body) {
  auto endpoint = adopt(body.first(hello.address_length), Stage::open);
  if (!endpoint) {  // the peer is gone already
    ++stale_dropped_;
    return;
  }
  (*endpoint)->peer = hello.from;
  Outgoing& out = new_outgoing();
  out.hello = {wire::kMagic, (*endpoint)->id.value, hello.from, 0};
  post(**endpoint, wire::welcome, out, sizeof out.hello, {}, UCP_AM_SEND_FLAG_EAGER);
  events_.emit({.kind = EventKind::accepted, .endpoint = (*endpoint)->id}, body.subspan(hello.address_length));
}

ucs_status_t UcxEngine::on_welcome(const wire::Hello& hello) {
  Endpoint* endpoint = find(hello.to);
  if (endpoint == nullptr || endpoint->stage != Stage::connecting || hello.magic != wire::kMagic) {
    ++stale_dropped_;
    return UCS_OK;
  }
  endpoint->peer = hello.from;
  endpoint->stage = Stage::open;
  events_.emit({.kind = EventKind::connected, .endpoint = endpoint->id});
  return UCS_OK;
}

ucs_status_t UcxEngine::on_goodbye(const wire::Goodbye& goodbye) {
  if (find(goodbye.to) != nullptr) goodbyes_.push_back(EndpointId(goodbye.to));
  return UCS_OK;
}

void UcxEngine::on_error(void* arg, ucp_ep_h handle, ucs_status_t status) {
  static_cast<UcxEngine*>(arg)->errors_.emplace_back(handle, status);
}

void UcxEngine::report_failures() {
  for (auto& [handle, status] : std::exchange(errors_, {}))
    if (auto found = by_handle_.find(handle); found != by_handle_.end())
      fail_endpoint(*found->second, ucx().status_string(status));
  for (auto id : std::exchange(goodbyes_, {}))
    if (Endpoint* endpoint = find(id.value)) fail_endpoint(*endpoint, "it closed the connection");
}

// Takes the UCX endpoint down at once (this is the fence) and tells the owner; close() forgets the rest.
void UcxEngine::fail_endpoint(Endpoint& endpoint, std::string why) {
  if (endpoint.stage == Stage::failed) return;
  endpoint.stage = Stage::failed;
  endpoint.failure = std::move(why);
  by_handle_.erase(endpoint.handle);
  finish_handle(std::exchange(endpoint.handle, nullptr));
  const Error error{ErrorCode::unavailable, fmt::format("the peer is gone: {}", endpoint.failure)};
  fail_operations(endpoint.id, error);
  events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
}

void UcxEngine::finish_handle(ucp_ep_h handle) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucx().ep_close_nbx(handle, &param);
  if (!UCS_PTR_IS_PTR(request)) return;
  // Forced closing waits for nobody, only for UCX's own steps.
  drain([&] { return ucx().request_check_status(request) != UCS_INPROGRESS; });
  ucx().request_free(request);
}

void UcxEngine::fail_operations(EndpointId endpoint, const Error& error) {
  for (auto& operation : operations_)
    if (!operation.reported && operation.endpoint == endpoint) report(operation, error);
}

// Ends what moves out of or into the region at the will of peers, who may stand still: reads of ours, and with their
// endpoint what a peer still pulls.
void UcxEngine::cut_off(RegionId region) {
  std::set<EndpointId> pulled_by;
  for (auto& operation : operations_) {
    if (operation.region != region) continue;
    if (!operation.local_done) pulled_by.insert(operation.endpoint);
    else if (!operation.reported && operation.target != nullptr)
      report(operation, Error{ErrorCode::cancelled, "the local region was deregistered"});
  }
  for (const auto& out : outgoing_)
    if (out.region == region) pulled_by.insert(out.endpoint);
  for (auto id : pulled_by)
    if (Endpoint* endpoint = find(id.value)) fail_endpoint(*endpoint, "memory was withdrawn in mid-transfer");
}

void UcxEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id.value);
  if (endpoint == nullptr) return;
  // Failed first: what progress brings in from now on is turned away. See "Fence" in docs/design-notes.md.
  const bool open = endpoint->stage == Stage::open;
  endpoint->stage = Stage::failed;
  if (open && endpoint->handle != nullptr) {  // UCX would not tell the peer
    Outgoing& out = new_outgoing();
    out.goodbye = {endpoint->peer};
    post(*endpoint, wire::goodbye, out, sizeof out.goodbye, {}, UCP_AM_SEND_FLAG_EAGER);
  }
  if (endpoint->handle != nullptr) {
    by_handle_.erase(endpoint->handle);
    finish_handle(endpoint->handle);
  }
  if (!bounces_) drain([&] { return endpoint->receiving == 0; });
  fail_operations(id, {ErrorCode::cancelled, "the endpoint was closed"});
  endpoints_.erase(id.value);
}

// Rendezvous writes that are landing are our own pulls out of the sender's memory: progress ends them, whether the
// sender runs, is stopped or has died. Should UCX ever break that, going on would break the fence.
void UcxEngine::drain(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!done()) {
    ucx().worker_progress(worker_);
    REJOIN_CHECK(std::chrono::steady_clock::now() < deadline, "UCX did not finish its pulls within 10 s");
  }
}

}  // namespace rejoin::transport::ucx
