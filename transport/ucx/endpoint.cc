// Connecting, accepting, failing and closing.
#include "transport/socket_address.h"
#include <chrono>

#include "transport/ucx/engine.h"

namespace rejoin::transport::ucx {

UcxEngine::Endpoint* UcxEngine::find(std::uint64_t id) {
  auto found = endpoints_.find(id);
  return found == endpoints_.end() ? nullptr : found->second.get();
}

Result<UcxEngine::Endpoint*> UcxEngine::open_endpoint(EndpointId id) {
  Endpoint* endpoint = find(id.value);
  if (endpoint == nullptr) return fail(ErrorCode::not_found, "endpoint {:x} is closed", id.value);
  if (endpoint->stage == Stage::failed)
    return fail(ErrorCode::unavailable, "endpoint {:x} has failed: {}", id.value, endpoint->failure);
  if (endpoint->stage != Stage::open)
    return fail(ErrorCode::unavailable, "endpoint {:x} is not connected yet", id.value);
  return endpoint;
}

UcxEngine::Endpoint& UcxEngine::adopt(ucp_ep_params_t& params, Stage stage, ucs_status_t& status) {
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->id = EndpointId(unguessable_.next());
  endpoint->stage = stage;
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&UcxEngine::on_error, this};
  status = ucp_ep_create(worker_, &params, &endpoint->handle);
  Endpoint& adopted = *endpoint;
  if (status == UCS_OK) by_handle_[adopted.handle] = &adopted;
  endpoints_[adopted.id.value] = std::move(endpoint);
  return adopted;
}

Result<EndpointId> UcxEngine::connect(const Address& peer, BytesView hello) {
  if (hello.size() > 4 * KiB)
    return fail(ErrorCode::invalid_argument, "a hello of {} bytes is over the limit of 4096", hello.size());
  auto address = SocketAddress::resolve(peer.text);
  if (!address) return tl::unexpected(address.error());
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {address->get(), address->length()};
  ucs_status_t status = UCS_OK;
  Endpoint& endpoint = adopt(params, Stage::connecting, status);
  if (status != UCS_OK) {
    endpoints_.erase(endpoint.id.value);
    return fail(ErrorCode::unavailable, "connecting to {}: {}", peer.text, ucs_status_string(status));
  }
  Outgoing& out = new_outgoing();
  out.hello = {wire::kMagic, endpoint.id.value, 0};
  out.payload.assign(hello.begin(), hello.end());
  const EndpointId id = endpoint.id;
  post(endpoint, wire::hello, out, sizeof out.hello, out.payload, UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER);
  return id;
}

void UcxEngine::accept(ucp_conn_request_h request) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  ucs_status_t status = UCS_OK;
  Endpoint& endpoint = adopt(params, Stage::accepting, status);
  if (status != UCS_OK) endpoints_.erase(endpoint.id.value);  // the connecting side sees it fail
}

ucs_status_t UcxEngine::on_hello(const void* header, std::size_t header_size, const void* data, std::size_t size,
                                 ucp_ep_h from) {
  auto found = by_handle_.find(from);
  wire::Hello hello{};
  if (header_size == sizeof hello) std::memcpy(&hello, header, sizeof hello);
  if (found == by_handle_.end() || found->second->stage != Stage::accepting) {
    ++stale_dropped_;
    return UCS_OK;
  }
  Endpoint& endpoint = *found->second;
  if (hello.magic != wire::kMagic || size > 4 * KiB) {
    errors_.emplace_back(from, UCS_ERR_INVALID_PARAM);
    return UCS_OK;
  }
  endpoint.peer = hello.from;
  endpoint.stage = Stage::open;
  Outgoing& out = new_outgoing();
  out.hello = {wire::kMagic, endpoint.id.value, hello.from};
  post(endpoint, wire::welcome, out, sizeof out.hello, {}, UCP_AM_SEND_FLAG_EAGER);
  events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, {static_cast<const std::byte*>(data), size});
  return UCS_OK;
}

ucs_status_t UcxEngine::on_welcome(const wire::Hello& header) {
  Endpoint* endpoint = find(header.nonce);
  if (endpoint == nullptr || endpoint->stage != Stage::connecting || header.magic != wire::kMagic) {
    ++stale_dropped_;
    return UCS_OK;
  }
  endpoint->peer = header.from;
  endpoint->stage = Stage::open;
  events_.emit({.kind = EventKind::connected, .endpoint = endpoint->id});
  return UCS_OK;
}

void UcxEngine::on_error(void* arg, ucp_ep_h handle, ucs_status_t status) {
  static_cast<UcxEngine*>(arg)->errors_.emplace_back(handle, status);
}

void UcxEngine::report_failures() {
  auto errors = std::exchange(errors_, {});
  for (auto& [handle, status] : errors) {
    auto found = by_handle_.find(handle);
    if (found == by_handle_.end()) continue;
    Endpoint& endpoint = *found->second;
    const bool unseen = endpoint.stage == Stage::accepting;  // nobody has heard of it yet
    fail_endpoint(endpoint, ucs_status_string(status));
    if (unseen) endpoints_.erase(endpoint.id.value);
  }
}

// Takes the UCX endpoint down at once (this is the fence) and tells the owner; close() forgets the rest.
void UcxEngine::fail_endpoint(Endpoint& endpoint, std::string why) {
  if (endpoint.stage == Stage::failed) return;
  const bool unseen = endpoint.stage == Stage::accepting;
  endpoint.stage = Stage::failed;
  endpoint.failure = std::move(why);
  by_handle_.erase(endpoint.handle);
  finish_handle(std::exchange(endpoint.handle, nullptr));
  const Error error{ErrorCode::unavailable, fmt::format("the peer is gone: {}", endpoint.failure)};
  fail_operations(endpoint.id, error);
  if (!unseen) events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
}

void UcxEngine::finish_handle(ucp_ep_h handle) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucp_ep_close_nbx(handle, &param);
  if (!UCS_PTR_IS_PTR(request)) return;
  // Forced closing waits for nobody, only for UCX's own steps.
  drain([&] { return ucp_request_check_status(request) != UCS_INPROGRESS; });
  ucp_request_free(request);
}

void UcxEngine::fail_operations(EndpointId endpoint, const Error& error) {
  for (auto& operation : operations_)
    if (!operation.reported && operation.endpoint == endpoint) report(operation, error);
}

void UcxEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id.value);
  if (endpoint == nullptr) return;
  // Failed first: what progress brings in from now on is turned away. See "Fence" in docs/design-notes.md.
  endpoint->stage = Stage::failed;
  Endpoint* owned = endpoint;
  if (owned->handle != nullptr) {
    by_handle_.erase(owned->handle);
    finish_handle(owned->handle);
  }
  drain([&] { return owned->receiving == 0; });
  fail_operations(id, {ErrorCode::cancelled, "the endpoint was closed"});
  endpoints_.erase(id.value);
}

// Rendezvous writes that are landing are our own pulls out of the sender's memory: progress ends them, whether the
// sender runs, is stopped or has died. Should UCX ever break that, going on would break the fence.
void UcxEngine::drain(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!done()) {
    ucp_worker_progress(worker_);
    REJOIN_CHECK(std::chrono::steady_clock::now() < deadline, "UCX did not finish its pulls within 10 s");
  }
}

}  // namespace rejoin::transport::ucx
