// Failing and closing.
#include <chrono>
#include <set>

#include "base/fail.h"
#include "transport/ucx/engine.h"

namespace rejoin::transport::ucx {

ucs_status_t UcxEngine::on_goodbye(const wire::Goodbye& goodbye) {
  if (find(goodbye.to) == nullptr) return drop();
  endings_.push_back({EndpointId(goodbye.to), ErrorCode::unavailable, "it closed the connection"});
  return UCS_OK;
}

void UcxEngine::on_error(void* arg, ucp_ep_h handle, ucs_status_t status) {
  static_cast<UcxEngine*>(arg)->errors_.emplace_back(handle, status);
}

void UcxEngine::report_failures() {
  for (auto& [handle, status] : std::exchange(errors_, {}))
    if (auto found = by_handle_.find(handle); found != by_handle_.end()) {
      found->second->peer = 0;  // nothing reaches it any more, a goodbye neither
      fail_endpoint(*found->second, ErrorCode::unavailable, ucx().status_string(status));
    }
  for (auto& [id, code, why] : std::exchange(endings_, {}))
    if (Endpoint* endpoint = find(id.value)) fail_endpoint(*endpoint, code, why);
}

// Takes the UCX endpoint down at once (this is the fence) and tells the owner; close() forgets the rest.
void UcxEngine::fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why) {
  if (endpoint.stage == Stage::failed) return;
  if (endpoint.stage == Stage::accepting) return refuse(endpoint.id, code, why);
  if (code == ErrorCode::refused) say_goodbye(endpoint);
  endpoint.stage = Stage::failed;
  endpoint.failure = std::move(why);
  by_handle_.erase(endpoint.handle);
  finish_handle(std::exchange(endpoint.handle, nullptr));
  const Error error{code, code == ErrorCode::refused ? fmt::format("the peer was refused: {}", endpoint.failure)
                                                     : fmt::format("the peer is gone: {}", endpoint.failure)};
  fail_operations(endpoint.id, error);
  events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
}

void UcxEngine::finish_handle(ucp_ep_h handle) {
  // The next endpoint may get the same address: its errors are not those of this one.
  std::erase_if(errors_, [&](const auto& error) { return error.first == handle; });
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
    if (Endpoint* endpoint = find(id.value))
      fail_endpoint(*endpoint, ErrorCode::unavailable, "memory was withdrawn in mid-transfer");
}

// UCX would not tell the peer.
void UcxEngine::say_goodbye(Endpoint& endpoint) {
  if (endpoint.handle == nullptr || endpoint.peer == 0) return;
  Outgoing& out = new_outgoing();
  out.goodbye = {endpoint.peer};
  post(endpoint, wire::goodbye, out, sizeof out.goodbye, {}, UCP_AM_SEND_FLAG_EAGER);
}

void UcxEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id.value);
  if (endpoint == nullptr) return;
  // Failed first: what progress brings in from now on is turned away. See "Fence" in docs/design-notes.md.
  strangers_.remove(id);
  endpoint->stage = Stage::failed;
  say_goodbye(*endpoint);
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
