// Numbered messages, the caller's and the engines' own.
#include "base/fail.h"
#include "transport/striped/engine.h"

namespace rejoin::transport::striped {

namespace {

constexpr std::uint64_t kReportAfterMessages = 32, kReportAfterBytes = 256 * KiB;
constexpr std::size_t kRoom = Engine::kMaxMessage - sizeof(wire::Header);

}  // namespace

void StripedEngine::send_control(Endpoint& endpoint, wire::Header header, BytesView rest) {
  header.number = endpoint.next_message++;
  Bytes bytes = joined(header, rest);
  if (endpoint.primary != kNoRail) {
    // A rail that refuses it is about to report its end; the message is kept and goes over the next one.
    Link* link = endpoint.rails[endpoint.primary].link;
    if (link != nullptr) (void)rails_[endpoint.primary]->send(link->endpoint, bytes);
  }
  endpoint.unsent.add(sizeof(Sent) + bytes.size());
  endpoint.unreceived.push_back({header.number, now_, std::move(bytes)});
}

void StripedEngine::check_unsent(Endpoint& endpoint) {
  if (endpoint.unsent.over()) fail_endpoint(endpoint, ErrorCode::exhausted, Unsent::why());
}

void StripedEngine::repeat_messages(Endpoint& endpoint) {
  Link* link = endpoint.rails[endpoint.primary].link;
  for (const auto& sent : endpoint.unreceived)
    if (!rails_[endpoint.primary]->send(link->endpoint, sent.bytes)) return;  // see send_control()
}

void StripedEngine::report_received(Endpoint& endpoint) {
  const bool due = endpoint.expected - endpoint.reported_received >= kReportAfterMessages ||
                   endpoint.bytes_since_report >= kReportAfterBytes;
  if (!due || endpoint.primary == kNoRail || endpoint.rails[endpoint.primary].link == nullptr) return;
  const wire::Header header{.kind = wire::Kind::received, .a = endpoint.expected, .b = endpoint.in.all_below};
  if (!rails_[endpoint.primary]->send(endpoint.rails[endpoint.primary].link->endpoint, bytes_of(header))) return;
  endpoint.reported_received = endpoint.expected;
  endpoint.bytes_since_report = 0;
}

Result<> StripedEngine::send(EndpointId id, BytesView message) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  now_ = clock_.now();  // see connect()
  const std::uint64_t complete = (*endpoint)->over.all_below;
  for (; message.size() > kRoom; message = message.subspan(kRoom))
    send_control(**endpoint, {.kind = wire::Kind::message, .more = 1, .a = complete}, message.first(kRoom));
  send_control(**endpoint, {.kind = wire::Kind::message, .a = complete}, message);
  check_unsent(**endpoint);
  return {};
}

void StripedEngine::malformed(Endpoint& endpoint, std::string_view what) {
  fail_endpoint(endpoint, ErrorCode::corrupt, fmt::format("it sent {}", what));
}

void StripedEngine::on_rail_message(Endpoint& endpoint, Link& link, BytesView bytes) {
  wire::Header header;
  const std::size_t size = bytes.size();
  if (!take(bytes, header)) return malformed(endpoint, "a message too short for its header");
  if (header.kind == wire::Kind::received || header.kind == wire::Kind::echo) {
    if (header.a > endpoint.next_message) return malformed(endpoint, "news of messages that were not sent");
    if (header.b > endpoint.next_write) return malformed(endpoint, "news of writes that were not begun");
    on_all_in(endpoint, header.b);
    for (auto& sent = endpoint.unreceived; !sent.empty() && sent.front().number < header.a; sent.pop_front())
      endpoint.unsent.remove(sizeof(Sent) + sent.front().bytes.size());
    return;
  }
  if (header.kind == wire::Kind::probe) {
    const wire::Header echo{.kind = wire::Kind::echo, .a = endpoint.expected, .b = endpoint.in.all_below};
    (void)rails_[link.rail]->send(link.endpoint, bytes_of(echo));  // refused: the rail is about to report its end
    return;
  }
  if (header.number < endpoint.expected) return;  // again, after a rail's end
  if (header.number > endpoint.expected) return malformed(endpoint, "a message out of order");
  ++endpoint.expected;
  endpoint.bytes_since_report += size;
  on_numbered(endpoint, header, bytes);
  report_received(endpoint);
}

void StripedEngine::on_numbered(Endpoint& endpoint, const wire::Header& header, BytesView rest) {
  using wire::Kind;
  if ((header.kind == Kind::hello) != (endpoint.stage == Stage::accepting))
    return malformed(endpoint, "a hello out of place, or none");
  switch (header.kind) {
    case Kind::hello:
      endpoint.stage = Stage::open;
      endpoint.announced = true;
      return events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, rest);
    case Kind::message: return on_message(endpoint, header, rest);
    case Kind::announce: {
      if (endpoint.in.contains(header.a) || header.a >= endpoint.in.all_below + kMaxOpenWrites || header.b == 0 ||
          header.b > wire::kMaxPieces)
        return malformed(endpoint, "a write that can't be");
      Incoming& incoming = endpoint.incoming[header.a];
      incoming.pieces = header.b;
      incoming.value = header.c;
      return settle_incoming(endpoint, header.a);
    }
    case Kind::withdraw:
      if (header.a >= endpoint.in.all_below + kMaxOpenWrites) return malformed(endpoint, "a withdrawal far ahead");
      // It may be in: the peer's rail may have ended with the acknowledgement on its way.
      return endpoint.in.contains(header.a) ? void() : mark_in(endpoint, header.a);
    case Kind::ask: {
      std::vector<wire::RailKey> keys;
      const Region* region = regions_.by_key(header.a);
      if (region == nullptr) regions_.count(Regions::Refusal::bad_key);
      for (std::size_t rail = 0; region != nullptr && rail < rails_.size(); ++rail) {
        const auto& there = rail_regions_.at(region->id.value)[rail];
        const RemoteRegion remote = there ? rails_[rail]->remote(*there) : RemoteRegion{};
        keys.push_back({remote.key, remote.length, there ? 1u : 0u});
      }
      send_control(endpoint, {.kind = Kind::answer, .a = header.a}, std::as_bytes(std::span(keys)));
      return check_unsent(endpoint);
    }
    case Kind::answer: return answer_keys(endpoint, header, rest);
    case Kind::rail_down: return on_rail_down(endpoint, header, rest);
    case Kind::landed: return on_landed(endpoint, header, rest);
    default: break;
  }
  malformed(endpoint, "a message of unknown kind");
}

// The bytes of the writes that were complete when it was sent are here, but their notifications may still lie in
// another rail, or come as `landed`.
void StripedEngine::on_message(Endpoint& endpoint, const wire::Header& header, BytesView part) {
  if (header.a > endpoint.in.all_below + kMaxOpenWrites) return malformed(endpoint, "a message far ahead");
  if (endpoint.kept.empty() && header.a <= endpoint.in.all_below) return deliver(endpoint, part, header.more != 0);
  endpoint.kept.push_back({header.a, header.more != 0, Bytes(part.begin(), part.end())});
  endpoint.kept_bytes += sizeof(Kept) + part.size();
  if (endpoint.kept_bytes > Unsent::kMost) malformed(endpoint, "too many messages ahead of its writes");
}

void StripedEngine::deliver(Endpoint& endpoint, BytesView part, bool more) {
  if (!endpoint.parts.add(part, more, endpoint.id, events_)) malformed(endpoint, "a message over the limit");
}

void StripedEngine::deliver_kept(Endpoint& endpoint, std::uint64_t all_in_below) {
  while (!endpoint.kept.empty() && endpoint.kept.front().writes_before <= all_in_below) {
    const Kept one = std::move(endpoint.kept.front());
    endpoint.kept.pop_front();
    endpoint.kept_bytes -= sizeof(Kept) + one.bytes.size();
    deliver(endpoint, one.bytes, one.more);
  }
}

// The peer no longer needs to keep what it has completed of these writes.
void StripedEngine::on_all_in(Endpoint& endpoint, std::uint64_t below) {
  if (below <= endpoint.all_in_there_below) return;
  endpoint.all_in_there_below = below;
  for (auto& link : endpoint.links)
    while (!link->completed.empty() && wire::number_of(link->completed.front()) < below) link->completed.pop_front();
}

// Our end is closed first: that is what makes sure that these bytes are in memory.
void StripedEngine::on_landed(Endpoint& endpoint, const wire::Header& header, BytesView tags) {
  for (auto& link : endpoint.links)
    if (link->rail == header.a && link->generation == header.b && !link->ended)
      end_link(endpoint, *link, "the peer says it is down");
  for (std::uint64_t tag; endpoint.stage == Stage::open && take(tags, tag);) count_in(endpoint, tag);
}

// The peer has fenced that instance of the rail: so do we, and what we had under way on it may go over another. Those
// before it the peer has fenced, too, and it need not say so of one that has been open only here: it would not where
// the next one of that rail has ended before it is asked.
void StripedEngine::on_rail_down(Endpoint& endpoint, const wire::Header& header, BytesView landed) {
  if (header.a >= endpoint.rails.size()) return malformed(endpoint, "news of a rail that we have not");
  const auto rail = static_cast<std::uint32_t>(header.a);
  for (auto& link : endpoint.links) {
    if (link->rail != rail || link->generation > header.b) continue;
    link->peer_fenced = true;
    if (link->generation == header.b)
      for (std::uint64_t tag; take(landed, tag);) link->landed_there.insert(tag);
    for (const auto& piece : std::exchange(link->orphans, {})) post_again(endpoint, *link, piece);
    if (!link->ended) end_link(endpoint, *link, "the peer says it is down");
    to_sweep_ = true;
  }
  if (endpoint.stage != Stage::open && endpoint.stage != Stage::accepting) return;
  report_fenced(endpoint, rail, static_cast<std::uint32_t>(header.b), {});  // of a link that has not been open here
  touch(endpoint);
}

}  // namespace rejoin::transport::striped
