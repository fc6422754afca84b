#include "transport/shm/engine.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/children.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "base/unix_socket.h"
#include "transport/epoll.h"
#include "transport/shm/factory.h"

namespace rejoin::transport::shm {

namespace {

constexpr std::chrono::nanoseconds kLookForRoom = std::chrono::milliseconds(1);

}  // namespace

Result<std::unique_ptr<Engine>> make_engine() { return ShmEngine::make(); }

Result<std::unique_ptr<Engine>> ShmEngine::make() {
  std::unique_ptr<ShmEngine> engine(new ShmEngine());
  if (auto started = engine->start(); !started) return tl::unexpected(started.error());
  return engine;
}

Result<> ShmEngine::start() {
  // Where a peer's descriptors are looked at, and its files opened: without it no connection comes about, and only one
  // side would know why.
  if (::access("/proc/thread-self/fd", X_OK) != 0)
    return fail(ErrorCode::unavailable, "transport shm needs /proc (/proc/thread-self/fd: {}): mount it, or use tcp",
                std::strerror(errno));
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return fail_errno("epoll_create1");
  auto doorbell = make_eventfd();
  if (!doorbell) return tl::unexpected(doorbell.error());
  doorbell_ = std::move(*doorbell);
  room_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!room_) return fail_errno("timerfd_create");
  for (const auto& [tag, fd] : {std::pair(kDoorbell, &doorbell_), std::pair(kRoom, &room_)}) {
    if (auto added = add_to(epoll_, fd->get(), {.events = EPOLLIN, .data = {.u64 = tag}}); !added) return added;
  }
  return {};
}

ShmEngine::~ShmEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
  hang_up(epoll_, listener_, process_);
}

Result<Address> ShmEngine::listen(const Address&) {
  if (auto shown = shows_itself(); !shown) return tl::unexpected(shown.error());
  name_ = fmt::format("@rejoin-{:016x}{:016x}", unguessable_.next(), unguessable_.next());
  auto socket = listen_unix(name_);
  if (!socket) return tl::unexpected(socket.error());
  hang_up(epoll_, listener_, process_);
  listener_ = std::move(*socket);
  children::keep_from(listener_);
  if (auto added = add_to(epoll_, listener_.get(), {.events = EPOLLIN, .data = {.u64 = kListener}}); !added)
    return tl::unexpected(added.error());
  return Address{"shm:" + name_};
}

Result<ShmEngine::Endpoint*> ShmEngine::adopt(Fd socket, Stage stage) {
  auto endpoint = std::make_unique<Endpoint>();
  do endpoint->id = EndpointId(unguessable_.next());
  while (endpoint->id.value <= kRoom);
  endpoint->stage = stage;
  endpoint->socket = std::move(socket);
  children::keep_from(endpoint->socket);
  const epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.u64 = endpoint->id.value}};
  if (auto added = add_to(epoll_, endpoint->socket.get(), event); !added) return tl::unexpected(added.error());
  Endpoint* adopted = endpoint.get();
  endpoints_[adopted->id.value] = std::move(endpoint);
  return adopted;
}

Result<EndpointId> ShmEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello); !checked) return tl::unexpected(checked.error());
  if (!peer.text.starts_with("shm:@"))
    return fail(ErrorCode::invalid_argument, "address '{}' is not of the form shm:@NAME", peer.text);
  auto socket = connect_unix(peer.text.substr(4));
  if (!socket) return tl::unexpected(socket.error());
  auto credentials = peer_credentials(*socket);
  if (!credentials) return tl::unexpected(credentials.error());
  if (!of_this_user(*credentials, peer.text.substr(4)))
    return fail(ErrorCode::refused, "{} is listened to by a process of {}, not of this one's, {}", peer.text,
                credentials->user(), ::geteuid());
  if (auto shown = shows_itself(); !shown) return tl::unexpected(shown.error());
  auto memory = make_sealed_memfd("rejoin-channel", sizeof(Channel));
  if (!memory) return tl::unexpected(memory.error());
  auto channel = Mapping::of(*memory, sizeof(Channel));
  if (!channel) return tl::unexpected(channel.error());
  auto* rings = new (channel->data()) Channel;  // no {}: the rings' pages are taken up as they are used

  if (has_private_memory_)
    if (auto readable = check_readable(); !readable) return tl::unexpected(readable.error());
  wire::Greeting greeting = greeting_of_ours();
  greeting.hello_length = hello.size();
  const Bytes bytes = joined(greeting, hello);
  if (auto sent = send_with_fds(*socket, bytes, {memory->get(), doorbell_.get()}); !sent)
    return tl::unexpected(sent.error());
  auto adopted = adopt(std::move(*socket), Stage::greeting);
  if (!adopted) return tl::unexpected(adopted.error());
  Endpoint& endpoint = **adopted;
  calls_.add(endpoint.id, clock_.now());
  endpoint.process = PeerProcess(credentials->pid);
  endpoint.channel = std::move(*channel);
  endpoint.out = RingWriter(&rings->to_server);
  endpoint.in = RingReader(&rings->to_client);
  return endpoint.id;
}

void ShmEngine::accept_all() {
  for (int i = 0; i < 64; ++i) {
    Fd socket = acceptor_.next(epoll_, listener_, clock_.now());
    if (!socket) return;
    auto credentials = peer_credentials(socket);
    if (!credentials || !of_this_user(*credentials, name_)) {  // another user's process: not of this job
      const auto user = credentials ? fmt::format("a process of {}", credentials->user()) : std::string();
      strangers_.turn_away(refusals::Why::user, user, "only processes of this user are taken");
      continue;
    }
    const auto adopted = adopt(std::move(socket), Stage::accepting);
    if (!adopted) {
      acceptor_.dropped(adopted.error(), clock_.now());
      continue;
    }
    Endpoint& endpoint = **adopted;
    endpoint.process = PeerProcess(credentials->pid);
    strangers_.add(endpoint.id, clock_.now(), endpoint.socket.get());
    if (strangers_.scarce()) return;
  }
}

void ShmEngine::look_after_greetings() {
  if (strangers_.empty() && calls_.empty() && !acceptor_.waits()) return;
  const TimePoint now = clock_.now();
  acceptor_.look(epoll_, listener_, now);
  while (const auto id = strangers_.to_go(now)) fail_endpoint(*find(*id), ErrorCode::timeout, Strangers::kTooLate);
  while (const auto id = calls_.overdue(now)) fail_endpoint(*find(*id), ErrorCode::timeout, calls_.too_late());
}

void ShmEngine::watch_sockets() {
  std::array<epoll_event, 64> ready;
  const int count = ::epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (ready[i].data.u64 == kListener) accept_all();
    else if (ready[i].data.u64 == kDoorbell) drain_eventfd(doorbell_);
    else if (ready[i].data.u64 == kRoom) drain_eventfd(room_);  // a timer is read as an eventfd is
    else if (Endpoint* endpoint = find(EndpointId(ready[i].data.u64))) on_socket(*endpoint);
  }
  look_after_greetings();
}

void ShmEngine::on_socket(Endpoint& endpoint) {
  if (endpoint.stage == Stage::failed) return;
  auto received = receive_with_fds(endpoint.socket, sizeof(wire::Greeting) + kMaxHello);
  if (!received) {
    // What it wrote into the ring before it went is still delivered, in turns.
    if (endpoint.stage == Stage::open) {
      endpoint.hung_up = received.error();
      return;
    }
    const auto told = endpoint.stage == Stage::greeting ? told_by_listener(endpoint) : std::nullopt;
    return fail_endpoint(endpoint, received.error().code, told.value_or(received.error().message));
  }
  if (!*received) return;
  if (endpoint.stage == Stage::accepting)
    return greet_as_server(endpoint, (*received)->bytes, std::move((*received)->fds));
  if (endpoint.stage == Stage::greeting)
    return finish_as_client(endpoint, (*received)->bytes, std::move((*received)->fds));
  fail_endpoint(endpoint, ErrorCode::corrupt, "it greeted twice");
}

// Whether we may open the peer's files, if all of its memory is in such; or else read its memory, tried on a word whose
// value is known.
Result<> ShmEngine::probe(Endpoint& endpoint, const wire::Greeting& greeting) {
  if (greeting.private_memory == 0 && endpoint.process.shows_file(greeting.probe_file)) return {};
  std::uint64_t seen = 0;
  const auto into = std::as_writable_bytes(std::span(&seen, 1));
  if (auto read = endpoint.process.read(greeting.probe_address, into); !read) return read;
  if (seen != wire::kMagic)
    return fail(ErrorCode::corrupt, "{} is of another Rejoin version", named(endpoint.process.id()));
  return {};
}

// A filter of system calls forbids reading to both sides as a rule. Who would be read finds that out by reading itself,
// and so knows why; the other side would only see it closed.
Result<> ShmEngine::check_readable() const {
  std::uint64_t seen = 0;
  const iovec local{&seen, sizeof seen}, own{const_cast<std::uint64_t*>(&probe_), sizeof seen};
  if (::process_vm_readv(::gettid(), &local, 1, &own, 1, 0) != sizeof seen) return unreadable(::getpid());
  return {};
}

void ShmEngine::greet_as_server(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds) {
  wire::Greeting greeting;
  const bool shaped = take(bytes, greeting) && greeting.magic == wire::kMagic && fds.size() == 2 &&
                      greeting.hello_length == bytes.size();
  if (!shaped) return fail_endpoint(endpoint, ErrorCode::corrupt, "it is not a Rejoin engine of this version");
  auto size = sealed_size(fds[0]);
  auto channel = size && *size == sizeof(Channel) ? Mapping::of(fds[0], sizeof(Channel))
                                                  : fail(ErrorCode::corrupt, "its channel has a wrong size");
  if (!channel) return fail_endpoint(endpoint, channel.error().code, channel.error().message);
  endpoint.channel = std::move(*channel);
  auto* rings = reinterpret_cast<Channel*>(endpoint.channel.data());
  endpoint.out = RingWriter(&rings->to_client);
  endpoint.in = RingReader(&rings->to_server);
  if (auto probed = probe(endpoint, greeting); !probed) return refuse(endpoint, probed.error());
  if (auto set = set_doorbell(endpoint, std::move(fds[1])); !set) return refuse(endpoint, set.error());
  const wire::Greeting answer = greeting_of_ours();
  if (auto sent = send_with_fds(endpoint.socket, bytes_of(answer), {doorbell_.get()}); !sent)
    return fail_endpoint(endpoint, sent.error().code, sent.error().message);
  open(endpoint);
  events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, bytes);
}

// Only this side knows why, and the caller's log and its job's status are where people look.
void ShmEngine::refuse(Endpoint& caller, const Error& why) {
  const auto text = as_bytes(why.message).first(std::min(why.message.size(), wire::kLongestRefusal));
  (void)caller.out.append(bytes_of(wire::Header{.kind = wire::Kind::refused, .length = text.size()}), text);
  fail_endpoint(caller, why.code, why.message);
}

std::optional<std::string> ShmEngine::told_by_listener(Endpoint& endpoint) {
  const auto record = endpoint.in.front();
  if (!record) return std::nullopt;
  wire::Header header;
  BytesView text = *record;
  if (!take(text, header) || header.kind != wire::Kind::refused) return std::nullopt;
  return "it has refused this connection: " + printable(as_text(text), wire::kLongestRefusal);
}

void ShmEngine::finish_as_client(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds) {
  wire::Greeting greeting;
  if (!take(bytes, greeting) || greeting.magic != wire::kMagic || fds.size() != 1)
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it is not a Rejoin engine of this version");
  if (auto probed = probe(endpoint, greeting); !probed)
    return fail_endpoint(endpoint, probed.error().code, probed.error().message);
  if (auto set = set_doorbell(endpoint, std::move(fds[0])); !set)
    return fail_endpoint(endpoint, set.error().code, set.error().message);
  open(endpoint);
  events_.emit({.kind = EventKind::connected, .endpoint = endpoint.id});
}

// It is the peer's: nobody waits for it, and to write into anything but an eventfd could end this process.
Result<> ShmEngine::set_doorbell(Endpoint& endpoint, Fd doorbell) const {
  std::array<char, 64> what{};
  const auto link = fmt::format("/proc/thread-self/fd/{}", doorbell.get());
  if (::readlink(link.c_str(), what.data(), what.size() - 1) < 0) return fail_errno(link);
  if (std::string_view(what.data()) != "anon_inode:[eventfd]")
    return fail(ErrorCode::corrupt, "what it offers as a doorbell is '{}'", what.data());
  const int flags = ::fcntl(doorbell.get(), F_GETFL);
  if (flags < 0 || ::fcntl(doorbell.get(), F_SETFL, flags | O_NONBLOCK) != 0) return fail_errno("its doorbell");
  endpoint.doorbell = std::move(doorbell);
  return {};
}

void ShmEngine::open(Endpoint& endpoint) {
  strangers_.remove(endpoint.id);
  calls_.remove(endpoint.id);
  endpoint.stage = Stage::open;
  open_.push_back(&endpoint);
}

Result<RegionId> ShmEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  if (kind != MemoryKind::host)
    return fail(ErrorCode::unreachable, "the shared-memory backend moves host memory only; stage device memory");
  const RegionId id = regions_.add(memory, access);
  if (const auto file = shared_file_of(memory)) files_[id.value] = *file;
  else if (!std::exchange(has_private_memory_, true)) let_peers_read();
  return id;
}

// Memory that is no file's is read out of this process. Under Yama's restricted ptrace any process of this user may do
// so from here on; elsewhere the call is refused and not needed.
void ShmEngine::let_peers_read() {
  (void)::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  readable_ = check_readable().has_value();
}

wire::Greeting ShmEngine::greeting_of_ours() const {
  return {.probe_address = reinterpret_cast<std::uintptr_t>(&probe_),
          .private_memory = has_private_memory_ ? 1u : 0u,
          .probe_file = doorbell_.get()};
}

// Nothing lands between polls, so the region can go at once. A peer that is to pull a write out of it is cut off; one
// that was told where to read asks again.
void ShmEngine::deregister(RegionId id) {
  for (auto& [key, endpoint] : endpoints_) {
    if (endpoint->stage != Stage::open) continue;
    bool writing = false;
    for (auto& [number, operation] : endpoint->operations) {
      if (operation.region != id) continue;
      writing = writing || !operation.read;
      if (!operation.read || std::exchange(operation.withdrawn, true)) continue;
      events_.emit({.kind = EventKind::completed,
                    .endpoint = endpoint->id,
                    .value = operation.context,
                    .error = Error{ErrorCode::cancelled, "the local region was deregistered"}});
    }
    if (writing) fail_endpoint(*endpoint, ErrorCode::cancelled, "memory was withdrawn in mid-transfer");
    else if (endpoint->read_from.erase(id.value) > 0 && ::getpid() == process_) endpoint->out.recall();
  }
  regions_.remove(id);
  files_.erase(id.value);
}

bool ShmEngine::arm() {
  if (!events_.empty()) return false;
  slept_ = true;
  for (auto* endpoint : open_) endpoint->in.announce_sleep(true);
  // Nobody rings when a ring has room again: a reader that stands still may not have any for a long time.
  if (std::any_of(open_.begin(), open_.end(), [](const Endpoint* endpoint) { return !endpoint->pending.empty(); })) {
    const itimerspec soon{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = kLookForRoom.count()}};
    REJOIN_CHECK(::timerfd_settime(room_.get(), 0, &soon, nullptr) == 0, "timerfd: {}", std::strerror(errno));
  }
  return std::all_of(open_.begin(), open_.end(), [](const Endpoint* endpoint) { return endpoint->in.empty(); });
}

void ShmEngine::fail_operations(Endpoint& endpoint, const Error& error) {
  for (const auto& [number, operation] : std::exchange(endpoint.operations, {}))
    if (!operation.withdrawn)
      events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = operation.context, .error = error});
}

void ShmEngine::fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why) {
  if (endpoint.stage == Stage::failed) return;
  const bool unseen = endpoint.stage == Stage::accepting;
  std::erase(open_, &endpoint);
  calls_.remove(endpoint.id);
  endpoint.stage = Stage::failed;
  endpoint.failure = std::move(why);
  hang_up_on(endpoint);
  endpoint.pending.clear();
  endpoint.unsent.clear();
  const Error error{code, fmt::format("the peer is gone: {}", endpoint.failure)};
  fail_operations(endpoint, error);
  if (unseen) {
    strangers_.refuse(endpoint.id, code, named(endpoint.process.id()), endpoint.failure);
    endpoints_.erase(endpoint.id.value);
    return;
  }
  events_.emit({.kind = EventKind::closed, .endpoint = endpoint.id, .error = error});
}

// What the peer still pulls out of our memory does not count; it sees the end, and nothing of its is pulled any more.
// The ring is the parent's in a child of fork().
void ShmEngine::hang_up_on(Endpoint& endpoint) {
  if (::getpid() == process_) endpoint.out.recall_all();
  hang_up(epoll_, endpoint.socket, process_);
}

void ShmEngine::close(EndpointId id) {
  Endpoint* endpoint = find(id);
  if (endpoint == nullptr) return;
  // As far as there is room for it: a farewell just sent should arrive. In a child of fork() the ring is the parent's.
  if (endpoint->stage == Stage::open && ::getpid() == process_) flush(*endpoint);
  std::erase(open_, endpoint);
  strangers_.remove(id);
  calls_.remove(id);
  hang_up_on(*endpoint);
  fail_operations(*endpoint, {ErrorCode::cancelled, "the endpoint was closed"});
  endpoints_.erase(id.value);
}

}  // namespace rejoin::transport::shm
