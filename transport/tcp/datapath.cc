// Frames out, and bytes in.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "transport/tcp/engine.h"

namespace rejoin::transport::tcp {

namespace {

constexpr std::size_t kBytesPerTurn = 4 * MiB;  // one endpoint's share of a poll(), so that none starves the others
constexpr std::size_t kFramesPerCall = 32;
// Buffers of sent messages, for the next ones: of small ones alone, which come often.
constexpr std::size_t kSpares = 64, kSpareBytes = 1 * KiB;
constexpr std::uint64_t kTogether = 1 * MiB, kWorthWaiting = 64 * KiB;  // bytes to come in one call

}  // namespace

std::span<const Event> TcpEngine::poll() {
  // Everything posted since the last poll() leaves in one system call an endpoint.
  flush_posted();
  for (auto id : std::exchange(unread_, {})) {
    Endpoint* endpoint = find(id);
    if (endpoint == nullptr || endpoint->stage == Stage::failed) continue;
    endpoint->unread = false;
    receive(*endpoint);
  }
  std::array<epoll_event, 64> ready;
  const int count = ::epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (ready[i].data.u64 == kListener) {
      accept_all();
      continue;
    }
    const EndpointId id(ready[i].data.u64);
    Endpoint* endpoint = find(id);
    if (endpoint == nullptr || endpoint->stage == Stage::failed) continue;
    if (endpoint->stage == Stage::connecting) finish_connecting(*endpoint);
    else if ((ready[i].events & EPOLLOUT) != 0) flush(*endpoint);
    // One that is unread has had its turn in this poll().
    if ((endpoint = find(id)) != nullptr && endpoint->stage != Stage::connecting && endpoint->stage != Stage::failed &&
        !endpoint->unread && (ready[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
      receive(*endpoint);
  }
  look_after_greetings();
  look_for_answers();
  if (polled_on_ && !events_.empty()) return events_.take();  // what is left goes out in the next poll()
  flush_posted();
  return events_.take();
}

// ---- out

void TcpEngine::flush_posted() {
  for (auto id : std::exchange(unflushed_, {}))
    if (Endpoint* endpoint = find(id)) {
      endpoint->dirty = false;
      if (endpoint->stage != Stage::failed) flush(*endpoint);
    }
}

void TcpEngine::add(Endpoint& endpoint, Frame frame) {
  if (!endpoint.out.empty() && endpoint.out.back().sent == 0) endpoint.out.back().header.more = 1;
  if (frame.header.kind != wire::Kind::write) frame.counted = sizeof frame + frame.owned.size();
  endpoint.unsent.add(frame.counted);
  endpoint.out.push_back(std::move(frame));
  if (!std::exchange(endpoint.dirty, true)) unflushed_.push_back(endpoint.id);
}

void TcpEngine::check_unsent(Endpoint& endpoint) {
  if (endpoint.unsent.over()) fail_endpoint(endpoint, ErrorCode::exhausted, Unsent::why());
}

void TcpEngine::keep_spare(Endpoint& endpoint, Bytes sent) {
  if (sent.capacity() > 0 && sent.capacity() <= kSpareBytes && endpoint.spare.size() < kSpares)
    endpoint.spare.push_back(std::move(sent));
}

void TcpEngine::queue(Endpoint& endpoint, const wire::Header& header, BytesView copied) {
  Frame frame{.header = header};
  if (!copied.empty()) {
    if (!endpoint.spare.empty()) {
      frame.owned = std::move(endpoint.spare.back());
      endpoint.spare.pop_back();
    }
    frame.owned.assign(copied.begin(), copied.end());
    frame.header.body_digest = wire::digest_of(copied);
  }
  add(endpoint, std::move(frame));
  endpoint.out.back().body = endpoint.out.back().owned;
}

void TcpEngine::queue_region(Endpoint& endpoint, const wire::Header& header, BytesView body, RegionId region) {
  add(endpoint, {.header = header, .body = body, .region = region});
}

// As sendmsg(). The hello is the caller's last word that is not encrypted.
ssize_t TcpEngine::send_some(Endpoint& endpoint, const msghdr& message) {
  if (endpoint.records && endpoint.stage == Stage::open) return endpoint.records->send(endpoint.socket, message);
  return ::sendmsg(endpoint.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void TcpEngine::flush(Endpoint& endpoint) {
  if (endpoint.stage == Stage::connecting) return;
  const auto unsent = [&] { return endpoint.records && endpoint.records->holds_unsent(); };
  for (std::size_t turn = 0; (!endpoint.out.empty() || unsent()) && turn < kBytesPerTurn;) {
    std::array<iovec, 2 * kFramesPerCall> parts;
    std::size_t used = 0;
    const auto add = [&](BytesView bytes, std::size_t skip) {
      if (bytes.size() > skip) parts[used++] = {const_cast<std::byte*>(bytes.data()) + skip, bytes.size() - skip};
    };
    for (auto& frame : endpoint.out) {
      if (used + 2 > parts.size()) break;
      if (frame.sent == 0) frame.header.digest = wire::digest_of_header(frame.header);  // it changes until it leaves
      add(bytes_of(frame.header), frame.sent);
      add(frame.body, frame.sent > sizeof frame.header ? frame.sent - sizeof frame.header : 0);
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = used;
    const ssize_t sent = send_some(endpoint, message);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return watch(endpoint, true);
      if (errno == EINTR) continue;
      if (errno == EBADMSG) return fail_damaged(endpoint);  // the kernel says so here, too
      // What the peer sent before it went is still to be read; reading ends in its close.
      watch(endpoint, false);
      if (errno == EPIPE || errno == ECONNRESET) return endpoint.out.clear(), endpoint.unsent.clear();
      return fail_endpoint(endpoint, ErrorCode::unavailable, std::strerror(errno));
    }
    turn += static_cast<std::size_t>(sent);
    for (std::size_t left = static_cast<std::size_t>(sent); left > 0;) {
      Frame& frame = endpoint.out.front();
      const std::size_t total = sizeof frame.header + frame.body.size();
      const std::size_t step = std::min(left, total - frame.sent);
      frame.sent += step;
      left -= step;
      if (frame.sent < total) break;
      endpoint.unsent.remove(frame.counted);
      keep_spare(endpoint, std::move(frame.owned));
      endpoint.out.pop_front();
    }
  }
  watch(endpoint, !endpoint.out.empty() || unsent());
}

Result<> TcpEngine::send(EndpointId id, BytesView message) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  queue(**endpoint, {.kind = wire::Kind::message, .length = message.size()}, message);
  check_unsent(**endpoint);
  return {};
}

Result<> TcpEngine::write(EndpointId id, std::span<const Write> writes) {
  auto found = find_for_posting(endpoints_, regions_, id, writes);
  if (!found) return tl::unexpected(found.error());
  Endpoint& endpoint = **found;
  for (const auto& write : writes) {
    const std::uint64_t operation = endpoint.next_operation++;
    endpoint.operations[operation] = {.context = write.context, .length = write.length};
    queue_region(endpoint,
                 {.kind = wire::Kind::write,
                  .has_notify = write.notify.has_value(),
                  .length = write.length,
                  .operation = operation,
                  .key = write.remote.region.key,
                  .offset = write.remote.offset,
                  .notify = write.notify.value_or(0)},
                 {*regions_.local(write.local, write.length), write.length}, write.local.region);
  }
  return {};
}

Result<> TcpEngine::read(EndpointId id, std::span<const Read> reads) {
  auto found = find_for_posting(endpoints_, regions_, id, reads);
  if (!found) return tl::unexpected(found.error());
  Endpoint& endpoint = **found;
  for (const auto& read : reads) {
    const std::uint64_t operation = endpoint.next_operation++;
    endpoint.operations[operation] = {.context = read.context,
                                      .is_read = true,
                                      .target = *regions_.local(read.local, read.length),
                                      .length = read.length,
                                      .region = read.local.region};
    queue(endpoint,
          {.kind = wire::Kind::read_request,
           .length = read.length,
           .operation = operation,
           .key = read.remote.region.key,
           .offset = read.remote.offset},
          {});
  }
  return {};
}

void TcpEngine::acknowledge(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal) {
  queue(endpoint, {.kind = wire::Kind::acknowledge, .operation = operation, .key = static_cast<std::uint64_t>(refusal)},
        {});
  check_unsent(endpoint);
}

// ---- in

// Reads what there is: the rest of a body straight to its place, and what follows into the buffer.
void TcpEngine::receive(Endpoint& endpoint) {
  const EndpointId id = endpoint.id;
  for (std::size_t turn = 0; turn < kBytesPerTurn;) {
    const bool direct = endpoint.in_body && !endpoint.discard && endpoint.begin == endpoint.end;
    std::size_t wanted = direct ? endpoint.header.length - endpoint.filled : 0;
    if (endpoint.records) wanted = std::min(wanted, kBytesPerTurn);  // which come in one call
    if (endpoint.begin == endpoint.end) endpoint.begin = endpoint.end = 0;
    std::array<iovec, 2> parts{};
    std::size_t used = 0;
    std::byte* place = endpoint.target != nullptr ? endpoint.target : endpoint.body.data();
    if (wanted > 0) parts[used++] = {place + endpoint.filled, wanted};
    parts[used++] = {endpoint.buffer.data() + endpoint.end, endpoint.to_read_ahead()};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = used;
    const ssize_t got = endpoint.records ? endpoint.records->receive(endpoint.socket, message)
                                         : ::recvmsg(endpoint.socket.get(), &message, MSG_DONTWAIT);
    if (got == 0) return fail_endpoint(endpoint, ErrorCode::unavailable, "it closed the connection");
    if (got < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      if (errno == EINTR) continue;
      if (errno == EBADMSG) return fail_damaged(endpoint);
      return fail_endpoint(endpoint, ErrorCode::unavailable, std::strerror(errno));
    }
    const auto count = static_cast<std::size_t>(got);
    turn += count;
    const std::size_t placed = std::min(count, wanted);
    endpoint.filled += placed;
    endpoint.end += count - placed;
    if (!parse(endpoint)) return;
    if (Endpoint* still = find(id); still == nullptr || still->stage == Stage::failed) return;
    // A short read means the socket is empty: no need to ask again.
    if (count < wanted + (parts[used - 1].iov_len)) break;
    if (endpoint.stage == Stage::open) endpoint.buffer.resize(kBuffer);
  }
  if (endpoint.records && endpoint.records->holds_received()) {
    if (!std::exchange(endpoint.unread, true)) unread_.push_back(id);
    return;
  }
  await_more(endpoint);
}

// Where more than the rest of this body is on its way, it pays to leave the socket alone until much has come: each call
// holds up the sender's side of it. At the end of a stream nothing is gained, and time lost.
void TcpEngine::await_more(Endpoint& endpoint) {
  if (endpoint.records) return;  // a part of what is missing may have come in a record that is not whole
  const std::uint64_t missing = endpoint.in_body ? endpoint.header.length - endpoint.filled : 0;
  const bool streaming = endpoint.header.more != 0 || missing >= 2 * kTogether;
  const int wanted = missing >= kWorthWaiting && streaming ? static_cast<int>(std::min(missing, kTogether)) : 1;
  if (wanted == std::exchange(endpoint.low_water, wanted)) return;
  set_option(endpoint.socket, SOL_SOCKET, SO_RCVLOWAT, wanted);
}

}  // namespace rejoin::transport::tcp
