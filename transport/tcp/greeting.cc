// How two engines greet: strangers that come in, the handshake, and what a listener spends on them meanwhile.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/log.h"
#include "transport/tcp/engine.h"

namespace rejoin::transport::tcp {

void TcpEngine::accept_all() {
  for (int i = 0; i < 64; ++i) {
    Fd socket = acceptor_.next(epoll_, listener_, clock_.now());
    if (!socket) return;
    use_no_pacing_inside_a_machine(socket);
    const auto stranger = adopt(std::move(socket), Stage::accepting);
    if (!stranger) {
      acceptor_.dropped(stranger.error(), clock_.now());
      continue;
    }
    strangers_.add((*stranger)->id, clock_.now(), (*stranger)->socket.get());
    if (strangers_.scarce()) return;
  }
}

void TcpEngine::look_after_greetings() {
  if (names_.waits()) look_at_names();
  if (strangers_.empty() && calls_.empty() && !acceptor_.waits()) return;
  const TimePoint now = clock_.now();
  look_after_calls(now);
  acceptor_.look(epoll_, listener_, now);
  while (const auto id = strangers_.to_go(now)) fail_endpoint(*find(*id), ErrorCode::timeout, Strangers::kTooLate);
  while (const auto id = calls_.overdue(now)) {
    Endpoint& call = *find(*id);
    const bool there = call.stage != Stage::connecting;  // its kernel is
    fail_endpoint(call, there ? ErrorCode::timeout : ErrorCode::unavailable,
                  call.socket ? calls_.too_late() : calls_.too_late("its name is not resolved"));
  }
}

void TcpEngine::refuse(const Endpoint& stranger, ErrorCode code) {
  strangers_.refuse(stranger.id, code, peer_of(stranger.socket), stranger.failure);
}

// A greeting that is due from this peer now.
bool TcpEngine::greets(const Endpoint& endpoint) const {
  const wire::Header& header = endpoint.header;
  const bool listens = endpoint.stage == Stage::accepting;
  if ((!listens && endpoint.stage != Stage::greeting) || header.operation != magic()) return false;
  switch (header.kind) {
    case wire::Kind::call:
      return listens && !endpoint.challenged && header.length == sizeof(Nonce) + sizeof(std::uint64_t);
    case wire::Kind::challenge: return !listens && !endpoint.challenged && header.length == sizeof(Nonce) + sizeof(Mac);
    case wire::Kind::hello:
      return listens && endpoint.challenged && header.length >= sizeof(Mac) && header.length <= sizeof(Mac) + kMaxHello;
    case wire::Kind::welcome: return !listens && endpoint.challenged && header.length == 0;
    default: return false;
  }
}

void TcpEngine::call(Endpoint& endpoint) {
  endpoint.ours = begin_greeting(endpoint);
  const Bytes call = joined(endpoint.ours, bytes_of(handshake::name_of(endpoint.secret)));
  queue(endpoint, {.kind = wire::Kind::call, .length = call.size(), .operation = magic()}, call);
}

void TcpEngine::on_call(Endpoint& endpoint) {
  BytesView body = endpoint.body;
  std::uint64_t name = 0;
  (void)(take(body, endpoint.theirs) && take(body, name));  // of this size, greets() says
  endpoint.secret = handshake::named(secrets_, name);
  endpoint.challenged = true;
  endpoint.by_kernel =
      by_kernel_ && endpoint.header.key == wire::kByKernel && kernel_tls::attach(endpoint.socket).has_value();
  endpoint.ours = begin_greeting(endpoint);
  const Bytes answer =
      joined(endpoint.ours,
             bytes_of(handshake::prove_listener(endpoint.secret, endpoint.theirs, endpoint.ours, options_.encrypt)));
  queue(endpoint,
        {.kind = wire::Kind::challenge,
         .length = answer.size(),
         .operation = magic(),
         .key = endpoint.by_kernel ? wire::kByKernel : 0},
        answer);
}

void TcpEngine::on_challenge(Endpoint& endpoint) {
  BytesView body = endpoint.body;
  Mac proof;
  (void)(take(body, endpoint.theirs) && take(body, proof));
  if (!equal_in_constant_time(
          proof, handshake::prove_listener(endpoint.secret, endpoint.ours, endpoint.theirs, options_.encrypt)))
    return fail_endpoint(endpoint, ErrorCode::refused, handshake::kUnproven);
  endpoint.challenged = true;
  // Who changes this on the way gets keys that differ.
  endpoint.by_kernel = endpoint.by_kernel && endpoint.header.key == wire::kByKernel;
  if (!encrypt(endpoint, true)) return;
  const auto own =
      handshake::prove_caller(endpoint.secret, endpoint.ours, endpoint.theirs, endpoint.hello, options_.encrypt);
  const Bytes answer = joined(own, endpoint.hello);
  queue(endpoint, {.kind = wire::Kind::hello, .length = answer.size(), .operation = magic()}, answer);
}

void TcpEngine::on_hello(Endpoint& endpoint) {
  BytesView hello = endpoint.body;
  Mac proof;
  (void)take(hello, proof);
  if (!equal_in_constant_time(
          proof, handshake::prove_caller(endpoint.secret, endpoint.theirs, endpoint.ours, hello, options_.encrypt)))
    return fail_endpoint(endpoint, ErrorCode::refused, "it has not proven that it has this job's key");
  if (!encrypt(endpoint, false) || !open(endpoint)) return;
  strangers_.remove(endpoint.id);
  queue(endpoint, {.kind = wire::Kind::welcome, .operation = magic()}, {});
  events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, hello);
}

Nonce TcpEngine::begin_greeting(Endpoint& endpoint) const {
  if (!options_.encrypt) return make_nonce();
  endpoint.exchange = std::make_unique<KeyExchange>();
  return endpoint.exchange->public_key();
}

// What comes from here on is in records; what goes out, once the endpoint is open. False where the endpoint is gone.
bool TcpEngine::encrypt(Endpoint& endpoint, bool calls) {
  if (!options_.encrypt) return true;
  if (endpoint.begin != endpoint.end) return malformed(endpoint, "more before its turn in the handshake");
  const auto shared = std::exchange(endpoint.exchange, nullptr)->agree(endpoint.theirs);
  if (!shared) {
    fail_endpoint(endpoint, ErrorCode::refused, shared.error().message);
    return false;
  }
  endpoint.records =
      std::make_unique<Records>(endpoint.secret, calls ? endpoint.ours : endpoint.theirs,
                                calls ? endpoint.theirs : endpoint.ours, *shared, calls, endpoint.by_kernel);
  return begin_records(endpoint, kernel_tls::Direction::in);
}

bool TcpEngine::begin_records(Endpoint& endpoint, kernel_tls::Direction direction) {
  const auto begun = endpoint.records->begin(endpoint.socket, direction);
  if (!begun) fail_endpoint(endpoint, ErrorCode::unavailable, begun.error().message);
  return begun.has_value();
}

// All that goes out from here on is in records. False where the endpoint is gone.
bool TcpEngine::open(Endpoint& endpoint) {
  if (endpoint.records && !begin_records(endpoint, kernel_tls::Direction::out)) return false;
  endpoint.stage = Stage::open;
  // From here on look_for_answers() does that, where the kernel tells it enough.
  if (traffic_of(endpoint.socket)) set_option(endpoint.socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 0);
  calls_.remove(endpoint.id);
  endpoint.buffer.resize(kQuietBuffer);
  return true;
}

}  // namespace rejoin::transport::tcp
