// Frames out of what has arrived, and what they mean.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "transport/tcp/engine.h"

namespace rejoin::transport::tcp {

// Takes whole frames out of what has arrived; false where the endpoint is gone.
bool TcpEngine::parse(Endpoint& endpoint) {
  for (;;) {
    if (!endpoint.in_body) {
      if (endpoint.end - endpoint.begin < sizeof(wire::Header)) {
        // Move the partial header to the front so that the rest fits.
        std::memmove(endpoint.buffer.data(), endpoint.buffer.data() + endpoint.begin, endpoint.end - endpoint.begin);
        endpoint.end -= endpoint.begin;
        endpoint.begin = 0;
        return true;
      }
      std::memcpy(&endpoint.header, endpoint.buffer.data() + endpoint.begin, sizeof(wire::Header));
      endpoint.begin += sizeof(wire::Header);
      if (!begin_frame(endpoint)) return false;
    }
    const std::uint64_t missing = endpoint.header.length - endpoint.filled;
    const std::size_t step = std::min<std::uint64_t>(missing, endpoint.end - endpoint.begin);
    if (step > 0 && !endpoint.discard) {
      std::byte* place = endpoint.target != nullptr ? endpoint.target : endpoint.body.data();
      std::memcpy(place + endpoint.filled, endpoint.buffer.data() + endpoint.begin, step);
    }
    endpoint.begin += step;
    endpoint.filled += step;
    if (endpoint.filled < endpoint.header.length) return true;
    const EndpointId id = endpoint.id;
    finish_frame(endpoint);
    if (Endpoint* still = find(id); still == nullptr || still->stage == Stage::failed) return false;
  }
}

bool TcpEngine::malformed(Endpoint& endpoint, std::string_view what) {
  fail_endpoint(endpoint, ErrorCode::corrupt, fmt::format("it sent {}", what));
  return false;
}

// Decides where the frame's body goes.
bool TcpEngine::begin_frame(Endpoint& endpoint) {
  wire::Header& header = endpoint.header;
  endpoint.in_body = true;
  endpoint.filled = 0;
  endpoint.target = nullptr;
  endpoint.landing = RegionId{};
  endpoint.discard = false;
  endpoint.refusal = Regions::Refusal::none;
  if (endpoint.stage != Stage::open && !greets(endpoint))
    return malformed(endpoint, "something other than a Rejoin greeting of this version");
  if (header.digest != wire::digest_of_header(header)) return malformed(endpoint, "a damaged header");
  const bool large = header.length >= kLargeBody && header.kind != wire::Kind::read_request;  // which has no body
  endpoint.since_large = large ? 0 : std::min(endpoint.since_large + 1, kFramesOfLarge);
  return begin_body(endpoint);
}

bool TcpEngine::begin_body(Endpoint& endpoint) {
  wire::Header& header = endpoint.header;
  switch (header.kind) {
    case wire::Kind::call:
    case wire::Kind::challenge:
    case wire::Kind::hello:
    case wire::Kind::welcome:
      if (endpoint.stage == Stage::open) return malformed(endpoint, "a second greeting");
      endpoint.body.resize(header.length);
      return true;
    case wire::Kind::message:
      if (header.length > kMaxMessage) return malformed(endpoint, "a message over the limit");
      endpoint.body.resize(header.length);
      return true;
    case wire::Kind::write:
      endpoint.refusal = regions_.check(header.key, header.offset, header.length, Access::remote_write);
      endpoint.discard = endpoint.refusal != Regions::Refusal::none;
      if (!endpoint.discard) {
        Region& region = *regions_.by_key(header.key);
        endpoint.landing = region.id;
        endpoint.target = region.memory.data() + header.offset;
      }
      return true;
    case wire::Kind::read_data: {
      auto found = endpoint.operations.find(header.operation);
      if (found == endpoint.operations.end() || !found->second.is_read || found->second.length != header.length)
        return malformed(endpoint, "an answer to a read that was not asked");
      endpoint.target = found->second.target;
      return true;
    }
    case wire::Kind::acknowledge:
    case wire::Kind::read_request:
      endpoint.filled = header.length;  // no body
      return true;
  }
  return malformed(endpoint, "a frame of unknown kind");
}

void TcpEngine::finish_frame(Endpoint& endpoint) {
  const wire::Header header = endpoint.header;
  endpoint.in_body = false;
  const bool copied = header.kind <= wire::Kind::message;
  if (copied && header.length > 0 && header.body_digest != wire::digest_of(endpoint.body)) {
    malformed(endpoint, "a damaged message");
    return;
  }
  switch (header.kind) {
    case wire::Kind::call: return on_call(endpoint);
    case wire::Kind::challenge: return on_challenge(endpoint);
    case wire::Kind::hello: return on_hello(endpoint);
    case wire::Kind::welcome:
      return open(endpoint) ? events_.emit({.kind = EventKind::connected, .endpoint = endpoint.id}) : void();
    case wire::Kind::message: return events_.emit({.kind = EventKind::message, .endpoint = endpoint.id}, endpoint.body);
    case wire::Kind::write:
      if (endpoint.refusal == Regions::Refusal::none && header.has_notify != 0)
        events_.emit({.kind = EventKind::written, .endpoint = endpoint.id, .value = header.notify});
      return acknowledge(endpoint, header.operation, endpoint.refusal);
    case wire::Kind::read_data: {
      const Operation operation = endpoint.operations.extract(header.operation).mapped();
      return events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = operation.context});
    }
    case wire::Kind::acknowledge: return on_acknowledge(endpoint);
    case wire::Kind::read_request: return on_read_request(endpoint);
  }
}

void TcpEngine::on_acknowledge(Endpoint& endpoint) {
  const auto operation = endpoint.operations.find(endpoint.header.operation);
  const auto refusal = static_cast<Regions::Refusal>(endpoint.header.key);
  const bool known = operation != endpoint.operations.end();
  if (!known || (operation->second.is_read && refusal == Regions::Refusal::none))
    return (void)malformed(endpoint, "an acknowledgement of nothing, or in the place of what is read");
  events_.emit({.kind = EventKind::completed,
                .endpoint = endpoint.id,
                .value = operation->second.context,
                .error = refusal_error(refusal)});
  endpoint.operations.erase(operation);
}

void TcpEngine::on_read_request(Endpoint& endpoint) {
  const wire::Header& header = endpoint.header;
  const auto refusal = regions_.check(header.key, header.offset, header.length, Access::remote_read);
  if (refusal != Regions::Refusal::none) return acknowledge(endpoint, header.operation, refusal);
  Region& region = *regions_.by_key(header.key);
  queue_region(endpoint, {.kind = wire::Kind::read_data, .length = header.length, .operation = header.operation},
               region.memory.subspan(header.offset, header.length), region.id);
  check_unsent(endpoint);
}

}  // namespace rejoin::transport::tcp
