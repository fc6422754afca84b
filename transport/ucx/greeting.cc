// How two engines greet: as transport/handshake.h has it, and what a listener spends on a caller meanwhile: an endpoint
// of UCX, without which it could not answer, and nothing else.
#include "base/fail.h"
#include "base/log.h"
#include "transport/ucx/address.h"
#include "transport/ucx/engine.h"

namespace rejoin::transport::ucx {

namespace {

constexpr std::size_t kLargestAddress = 16 * KiB;

}  // namespace

Result<UcxEngine::Endpoint*> UcxEngine::adopt(BytesView address, Stage stage) {
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->id = EndpointId(unguessable_.next());
  endpoint->stage = stage;
  endpoint->greeting = std::make_unique<Greeting>();
  endpoint->greeting->ours = make_nonce();
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
  auto adopted = adopt(*address, Stage::calling);
  if (!adopted) return tl::unexpected(adopted.error());
  Endpoint& endpoint = **adopted;
  endpoint.greeting->secret = peer.secret;
  endpoint.greeting->hello.assign(hello.begin(), hello.end());
  Outgoing& out = new_outgoing();
  out.call = {wire::kMagic, endpoint.id.value, handshake::name_of(peer.secret), endpoint.greeting->ours};
  out.payload = address_;
  post(endpoint, wire::call, out, sizeof out.call, out.payload, UCP_AM_SEND_FLAG_EAGER);
  return endpoint.id;
}

ucs_status_t UcxEngine::on_call(const wire::Call& call, BytesView body) {
  const bool sound = call.magic == wire::kMagic && call.from != 0 && !body.empty() && body.size() <= kLargestAddress;
  if (!sound || !listening_) return drop();
  calls_.emplace_back(call, Bytes(body.begin(), body.end()));
  return UCS_OK;
}

void UcxEngine::take_call(const wire::Call& call, BytesView address) {
  auto adopted = adopt(address, Stage::accepting);
  if (!adopted) return;  // the peer is gone already
  Endpoint& endpoint = **adopted;
  endpoint.peer = call.from;
  endpoint.greeting->theirs = call.nonce;
  endpoint.greeting->secret = handshake::named(secrets_, call.secret);
  strangers_.add(endpoint.id, clock_.now());
  Outgoing& out = new_outgoing();
  out.challenge = {call.from, wire::kMagic, endpoint.id.value, endpoint.greeting->ours,
                   handshake::prove_listener(endpoint.greeting->secret, call.nonce, endpoint.greeting->ours)};
  post(endpoint, wire::challenge, out, sizeof out.challenge, {}, UCP_AM_SEND_FLAG_EAGER);
}

ucs_status_t UcxEngine::on_challenge(const wire::Challenge& challenge) {
  Endpoint* endpoint = find(challenge.to);
  if (endpoint == nullptr || endpoint->stage != Stage::calling || challenge.magic != wire::kMagic) return drop();
  Greeting& greeting = *endpoint->greeting;
  endpoint->peer = challenge.from;
  greeting.theirs = challenge.nonce;
  if (!equal_in_constant_time(challenge.proof,
                              handshake::prove_listener(greeting.secret, greeting.ours, greeting.theirs))) {
    endings_.push_back({endpoint->id, ErrorCode::refused, handshake::kUnproven});
    return UCS_OK;
  }
  endpoint->stage = Stage::answering;
  Outgoing& out = new_outgoing();
  out.hello = {challenge.from,
               handshake::prove_caller(greeting.secret, greeting.ours, greeting.theirs, greeting.hello)};
  out.payload = greeting.hello;
  post(*endpoint, wire::hello, out, sizeof out.hello, out.payload, UCP_AM_SEND_FLAG_EAGER);
  return UCS_OK;
}

ucs_status_t UcxEngine::on_hello(const wire::Hello& hello, BytesView body) {
  Endpoint* endpoint = find(hello.to);
  if (endpoint == nullptr || endpoint->stage != Stage::accepting || body.size() > kMaxHello) return drop();
  const Greeting& greeting = *endpoint->greeting;
  if (!equal_in_constant_time(hello.proof,
                              handshake::prove_caller(greeting.secret, greeting.theirs, greeting.ours, body))) {
    endings_.push_back({endpoint->id, ErrorCode::refused, "it has not proven that it has this job's key"});
    return UCS_OK;
  }
  strangers_.remove(endpoint->id);
  endpoint->stage = Stage::open;
  endpoint->greeting.reset();
  Outgoing& out = new_outgoing();
  out.welcome = {endpoint->peer};
  post(*endpoint, wire::welcome, out, sizeof out.welcome, {}, UCP_AM_SEND_FLAG_EAGER);
  events_.emit({.kind = EventKind::accepted, .endpoint = endpoint->id}, body);
  return UCS_OK;
}

ucs_status_t UcxEngine::on_welcome(const wire::Welcome& welcome) {
  Endpoint* endpoint = find(welcome.to);
  if (endpoint == nullptr || endpoint->stage != Stage::answering) return drop();
  endpoint->stage = Stage::open;
  endpoint->greeting.reset();
  events_.emit({.kind = EventKind::connected, .endpoint = endpoint->id});
  return UCS_OK;
}

// ---- strangers

void UcxEngine::look_after_strangers() {
  if (strangers_.empty()) return;
  const TimePoint now = clock_.now();
  while (const auto id = strangers_.to_go(now)) refuse(*id, ErrorCode::timeout, Strangers::kTooLate);
}

// Nobody here has heard of it yet.
void UcxEngine::refuse(EndpointId stranger, ErrorCode code, const std::string& why) {
  close(stranger);
  strangers_.refuse(stranger, code, "", why);
}

}  // namespace rejoin::transport::ucx
