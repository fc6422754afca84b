#include "transport/tcp/engine.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/children.h"
#include "base/deadlines.h"
#include "base/fail.h"
#include "base/log.h"
#include "transport/epoll.h"
#include "transport/socket_address.h"
#include "transport/tcp/round_trip.h"

namespace rejoin::transport::tcp {

void use_no_pacing_inside_a_machine(const Fd& socket) {
  sockaddr_storage here{}, there{};
  socklen_t here_length = sizeof here, there_length = sizeof there;
  const bool known = ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&here), &here_length) == 0 &&
                     ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &there_length) == 0;
  const auto host = [](const sockaddr_storage& address) {
    const std::string text = SocketAddress::format(address);
    return text.substr(0, text.rfind(':'));
  };
  constexpr std::string_view reno = "reno";  // every kernel has it
  if (known && host(here) == host(there))
    (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, reno.data(), reno.size());
}

std::string peer_of(const Fd& socket) {
  sockaddr_storage there{};
  socklen_t length = sizeof there;
  const bool known = ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &length) == 0;
  return known ? SocketAddress::format(there) : std::string();
}

void set_option(const Fd& socket, int level, int name, int value) {
  (void)::setsockopt(socket.get(), level, name, &value, sizeof value);
}

Result<std::unique_ptr<Engine>> make_engine(const Options& options) { return TcpEngine::make(options); }

Result<std::unique_ptr<Engine>> TcpEngine::make(const Options& options) {
  std::unique_ptr<TcpEngine> engine(new TcpEngine(options));
  if (auto started = engine->start(); !started) return tl::unexpected(started.error());
  return engine;
}

Result<> TcpEngine::start() {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return fail_errno("epoll_create1");
  if (options_.encrypt && !Records::available())
    return fail(ErrorCode::unavailable,
                "transport tcp+aes needs X25519 and AES-256-GCM, which this machine's OpenSSL does not have or its "
                "configuration forbids");
  if (!options_.kernel) return {};
  const auto& there = kernel_tls::available();
  by_kernel_ = options_.encrypt && there;
  static std::once_flag said;
  std::call_once(said, [&] {
    if (there) logger().info("tcp+aes: the kernel encrypts, towards peers of ktls=1");
    else logger().warn("tcp+aes: ktls=1 has no effect, this process encrypts: {}", there.error().message);
  });
  return {};
}

TcpEngine::~TcpEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
  hang_up(epoll_, listener_, process_);  // who is still to be accepted, and whoever listens there next, finds it closed
}

Result<Address> TcpEngine::listen(const Address& where) {
  const std::string port = where.text.substr(std::min(where.text.rfind(':'), where.text.size()));
  const std::string local = this->local();
  const std::string at = local.empty() ? where.text : local + port;
  auto address = SocketAddress::resolve(at);
  if (!address) return tl::unexpected(address.error());
  Fd socket(::socket(address->get()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno("socket");
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->get()->sa_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (options_.one_of_several) set_option(socket, IPPROTO_IP, IP_FREEBIND, 1);  // of IPv6, too
  if (::bind(socket.get(), address->get(), address->length()) != 0 || ::listen(socket.get(), 512) != 0)
    return fail_errno(
        fmt::format("can't listen for data connections on {}{}", at, local.empty() ? "" : ", the rail's own address"));
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) return fail_errno("getsockname");
  if (auto added = add_to(epoll_, socket.get(), {.events = EPOLLIN, .data = {.u64 = kListener}}); !added)
    return tl::unexpected(added.error());
  hang_up(epoll_, listener_, process_);
  listener_ = std::move(socket);
  children::keep_from(listener_);
  return Address{SocketAddress::format(bound)};
}

// Whether this machine has the rail's address.
Result<> TcpEngine::usable() {
  const std::string local = this->local();
  if (local.empty()) return {};
  const auto parts = SocketAddress::split(local + ":0");
  if (!parts) return tl::unexpected(parts.error());
  const auto own = SocketAddress::check_own(*parts);
  if (own || own.error().code == ErrorCode::invalid_argument) return own;
  return fail(ErrorCode::unavailable, "rail {}: {}; is the interface up that has this address?", local,
              own.error().message);
}

TcpEngine::Endpoint& TcpEngine::make_endpoint(Stage stage) {
  auto endpoint = std::make_unique<Endpoint>();
  do endpoint->id = EndpointId(unguessable_.next());
  while (endpoint->id.value == kListener || endpoint->id.value == kNames);
  endpoint->stage = stage;
  endpoint->buffer.resize(stage == Stage::accepting ? kStrangersBuffer : kQuietBuffer);
  Endpoint& made = *endpoint;
  endpoints_[made.id.value] = std::move(endpoint);
  return made;
}

Result<TcpEngine::Endpoint*> TcpEngine::adopt(Fd socket, Stage stage) {
  Endpoint& adopted = make_endpoint(stage);
  const auto taken = take_up(adopted, std::move(socket));
  if (taken) return &adopted;
  endpoints_.erase(adopted.id.value);
  return tl::unexpected(taken.error());
}

Result<> TcpEngine::take_up(Endpoint& endpoint, Fd socket) {
  endpoint.socket = std::move(socket);
  children::keep_from(endpoint.socket);
  set_option(endpoint.socket, IPPROTO_TCP, TCP_NODELAY, 1);
  limit_unacknowledged(endpoint);
  probe_when_idle(endpoint.socket);
  endpoint.wants_write = endpoint.stage == Stage::connecting;
  return add_to(
      epoll_, endpoint.socket.get(),
      {.events = EPOLLIN | EPOLLRDHUP | (endpoint.wants_write ? EPOLLOUT : 0u), .data = {.u64 = endpoint.id.value}});
}

// Until it is open, and from its end on. Addresses that have to be tried one after the other share the time that there
// is for all of them.
void TcpEngine::limit_unacknowledged(const Endpoint& endpoint) const {
  const std::int64_t parts = endpoint.stage == Stage::connecting ? endpoint.addresses : 1;
  set_option(endpoint.socket, IPPROTO_TCP, TCP_USER_TIMEOUT,
             static_cast<int>(milliseconds(deadlines::kUnacknowledged.of(silence_)) / parts));
}

// Where bytes of the peer's lie unread at the end, the kernel resets the connection and drops what it still has to
// send. So much of them at most: their sender may be faster. What the kernel decrypts can't be passed over.
void TcpEngine::discard_unread(const Endpoint& endpoint) {
  if (endpoint.by_kernel) return;
  constexpr std::size_t most = 64 * MiB, step = 1 * MiB;
  std::size_t discarded = 0;
  for (ssize_t got = 1; got > 0 && discarded < most; discarded += static_cast<std::size_t>(got))
    got = std::max<ssize_t>(0, ::recv(endpoint.socket.get(), nullptr, step, MSG_TRUNC | MSG_DONTWAIT));
}

// Nobody looks any more at what the kernel still has of it, for a peer that may never read.
void TcpEngine::part(Endpoint& endpoint) {
  if (::getpid() == process_) limit_unacknowledged(endpoint);
  hang_up(epoll_, endpoint.socket, process_);
}

// What lies between keeps a connection in mind for as long as it sees something of it. One that was forgotten all the
// same, or whose peer's machine is gone, ends as one does on which something was sent.
void TcpEngine::probe_when_idle(const Fd& socket) const {
  constexpr std::int64_t most = 127;  // that Linux takes
  const std::int64_t after = probe_after(silence_).count();
  const std::int64_t rest = deadlines::kUnacknowledged.of(silence_) / std::chrono::seconds(1) - after;
  const std::int64_t probes = std::clamp<std::int64_t>(rest / after, 1, most);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(after));
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(std::max(after, rest / probes)));
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>(probes));
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

Result<EndpointId> TcpEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello); !checked) return tl::unexpected(checked.error());
  if (auto formed = SocketAddress::split(peer.text); !formed) return tl::unexpected(formed.error());
  Endpoint& endpoint = make_endpoint(Stage::connecting);
  const auto address = SocketAddress::numeric(peer.text);
  const auto begun = address ? begin_connection(endpoint, {*address})
                             : names_.ask(peer.text, endpoint.id.value, epoll_, kNames, clock_.now());
  if (!begun) {
    endpoints_.erase(endpoint.id.value);
    return fail(begun.error().code, "connecting to {}: {}", peer.text, begun.error().message);
  }
  endpoint.secret = peer.secret;
  endpoint.hello.assign(hello.begin(), hello.end());
  calls_.add(endpoint.id, clock_.now());
  call(endpoint);
  return endpoint.id;
}

Result<> TcpEngine::begin_connection(Endpoint& endpoint, std::deque<SocketAddress> addresses) {
  auto socket = begin_connection(addresses);
  if (!socket) return tl::unexpected(socket.error());
  endpoint.further = std::move(addresses);
  endpoint.addresses = 1 + static_cast<std::uint32_t>(endpoint.further.size());
  endpoint.called_at = clock_.now();
  if (!endpoint.further.empty()) trying_.push_back(endpoint.id);
  return take_up(endpoint, std::move(*socket));
}

// Of a peer whose name takes its time no other one hears less.
void TcpEngine::look_at_names() {
  for (auto& [asker, addresses] : names_.take(clock_.now(), silence_ / 4)) {
    Endpoint* endpoint = find(EndpointId(asker));
    if (endpoint == nullptr || endpoint->stage != Stage::connecting) continue;
    const auto begun = addresses.and_then([&](auto& found) { return begin_connection(*endpoint, std::move(found)); });
    if (!begun) fail_endpoint(*endpoint, ErrorCode::unavailable, begun.error().message);
  }
}

// To the first of these that does not fail at once; it and those before it are taken out.
Result<Fd> TcpEngine::begin_connection(std::deque<SocketAddress>& addresses) const {
  Result<Fd> socket = fail(ErrorCode::unavailable, "no address is left");
  while (!socket && !addresses.empty()) {
    socket = begin_connection(addresses.front());
    addresses.pop_front();
  }
  return socket;
}

Result<Fd> TcpEngine::begin_connection(const SocketAddress& address) const {
  Fd socket(::socket(address.get()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno("socket");
  if (const std::string from = local(); !from.empty()) {
    auto local = SocketAddress::resolve(from + ":0");
    if (!local) return tl::unexpected(local.error());
    if (::bind(socket.get(), local->get(), local->length()) != 0)
      return fail_errno(fmt::format("rail {}: can't connect from this address", from));
  }
  if (::connect(socket.get(), address.get(), address.length()) != 0 && errno != EINPROGRESS)
    return fail_errno("connect");
  return socket;
}

// A name may have addresses at which nobody listens, as where its machine has IPv6 and the peer listens on IPv4 alone.
void TcpEngine::finish_connecting(Endpoint& endpoint) {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(endpoint.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    if (!try_further(endpoint)) fail_endpoint(endpoint, ErrorCode::unavailable, std::strerror(error));
    return;
  }
  endpoint.further.clear();
  endpoint.stage = Stage::greeting;
  limit_unacknowledged(endpoint);
  use_no_pacing_inside_a_machine(endpoint.socket);
  // Only of a connection that is there it can be known. So far there is nothing but the call to go out.
  endpoint.by_kernel = by_kernel_ && kernel_tls::attach(endpoint.socket);
  if (endpoint.by_kernel) endpoint.out.front().header.key = wire::kByKernel;
  flush(endpoint);
}

// False: no address is left.
bool TcpEngine::try_further(Endpoint& endpoint) {
  auto next = begin_connection(endpoint.further);
  if (!next) return false;
  hang_up(epoll_, endpoint.socket, process_);
  endpoint.called_at = clock_.now();
  const auto taken = take_up(endpoint, std::move(*next));
  if (!taken) fail_endpoint(endpoint, ErrorCode::unavailable, taken.error().message);
  return true;
}

// One that answers nothing, as where a machine's IPv6 leads nowhere, would take all the time that the caller has.
void TcpEngine::look_after_calls(TimePoint now) {
  std::erase_if(trying_, [&](EndpointId id) {
    Endpoint* call = find(id);
    if (call == nullptr || call->stage != Stage::connecting || call->further.empty()) return true;
    if (now - call->called_at > deadlines::kAllAddresses.of(silence_) / call->addresses) (void)try_further(*call);
    return call->further.empty();
  });
}

// Of open ones: what is said before has a time of its own.
void TcpEngine::look_for_answers() {
  const auto passed = looks_.due(clock_.now(), silence_);
  if (!passed) return;
  for (auto& [id, endpoint] : endpoints_) {
    const auto traffic = endpoint->stage == Stage::open ? traffic_of(endpoint->socket) : std::nullopt;
    if (!traffic) continue;
    if (const auto silent = endpoint->unanswered.too_long(*traffic, *passed, silence_))
      fail_endpoint(*endpoint, ErrorCode::timeout,
                    fmt::format("its machine has answered nothing at {} for {:.1f} s", peer_of(endpoint->socket),
                                seconds(*silent)));
  }
}

void TcpEngine::watch(Endpoint& endpoint, bool wants_write) {
  if (endpoint.wants_write == wants_write) return;
  endpoint.wants_write = wants_write;
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP | (wants_write ? EPOLLOUT : 0u), .data = {.u64 = endpoint.id.value}};
  REJOIN_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, endpoint.socket.get(), &event) == 0, "epoll_ctl: {}",
               std::strerror(errno));
}

Result<RegionId> TcpEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  if (kind != MemoryKind::host)
    return fail(ErrorCode::unreachable, "the TCP backend moves host memory only; stage device memory");
  return regions_.add(memory, access);
}

// A transfer that touches the region now is cut off with its endpoint: the frame can't be taken back from a stream.
void TcpEngine::deregister(RegionId id) {
  if (regions_.find(id) == nullptr) return;  // what is in no region has RegionId{}
  std::vector<Endpoint*> busy;
  for (auto& [key, endpoint] : endpoints_) {
    if (endpoint->stage == Stage::failed) continue;
    bool touches = endpoint->in_body && endpoint->landing == id;
    for (const auto& frame : endpoint->out) touches |= frame.region == id;
    for (const auto& [number, operation] : endpoint->operations) touches |= operation.is_read && operation.region == id;
    if (touches) busy.push_back(endpoint.get());
  }
  for (Endpoint* endpoint : busy)
    fail_endpoint(*endpoint, ErrorCode::cancelled, "memory was withdrawn in mid-transfer");
  regions_.remove(id);
}

void TcpEngine::fail_operations(Endpoint& endpoint, const Error& error) {
  for (const auto& [number, operation] : std::exchange(endpoint.operations, {}))
    events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = operation.context, .error = error});
}

void TcpEngine::fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why) {
  if (endpoint.stage == Stage::failed) return;
  const bool unseen = endpoint.stage == Stage::accepting, was_there = endpoint.stage != Stage::connecting;
  endpoint.stage = Stage::failed;
  endpoint.failure = std::move(why);
  calls_.remove(endpoint.id);
  names_.forget(endpoint.id.value);
  if (unseen) refuse(endpoint, code);
  part(endpoint);  // the fence
  endpoint.out.clear();
  endpoint.unsent.clear();
  const Error error{
      code, fmt::format("{}: {}", was_there ? "the peer is gone" : "it can't be connected with", endpoint.failure)};
  fail_operations(endpoint, error);
  if (unseen) {
    endpoints_.erase(endpoint.id.value);
    return;
  }
  events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
}

void TcpEngine::fail_damaged(Endpoint& endpoint) {
  constexpr const char* kWhy = "what came was damaged, or from somebody else";
  if (damaged_.may_say(clock_.now())) logger().warn("an encrypted data connection is closed: {}", kWhy);
  fail_endpoint(endpoint, ErrorCode::corrupt, kWhy);
}

std::optional<Duration> TcpEngine::round_trip(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end() || found->second->stage != Stage::open) return std::nullopt;
  return least_round_trip(found->second->socket);
}

std::optional<std::uint64_t> TcpEngine::acknowledged(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end() || found->second->stage != Stage::open) return std::nullopt;
  return acknowledged_of_more(found->second->socket);
}

void TcpEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id);
  if (endpoint == nullptr) return;
  // What was queued is handed to the kernel as far as it takes it now: a farewell just sent should arrive.
  // In a child of fork() the queue is a copy of its parent's.
  if (endpoint->stage == Stage::open && ::getpid() == process_) flush(*endpoint);
  if (endpoint = find(id); endpoint == nullptr) return;
  if (endpoint->stage == Stage::open && ::getpid() == process_) discard_unread(*endpoint);
  calls_.remove(id);
  names_.forget(id.value);
  part(*endpoint);
  fail_operations(*endpoint, {ErrorCode::cancelled, "the endpoint was closed"});
  endpoints_.erase(id.value);
}

}  // namespace rejoin::transport::tcp
