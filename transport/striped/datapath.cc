// Pieces of writes and reads, out and in over the rails.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "transport/striped/engine.h"

namespace rejoin::transport::striped {

namespace {

constexpr std::size_t kMaxKeys = 4096;  // of the peer's regions, remembered

}  // namespace

void StripedEngine::on_rail_event(std::uint32_t rail, const Event& event) {
  if (event.kind == EventKind::accepted) return on_accepted(rail, event);
  auto found = by_link_[rail].find(event.endpoint.value);
  if (found == by_link_[rail].end()) return;
  auto [endpoint, link] = found->second;
  if (event.kind != EventKind::completed || !event.error) {
    if (now_ - endpoint->last_heard > options_.stall / 2) endpoint->awake_since = now_;
    link->last_heard = endpoint->last_heard = now_;
  }
  switch (event.kind) {
    case EventKind::completed: return on_piece_done(*endpoint, *link, event.value, event.error);
    case EventKind::closed:
      if (!link->ended) end_link(*endpoint, *link, event.error ? event.error->message : "closed");
      return;
    default: break;
  }
  if (link->ended || endpoint->stage == Stage::failed || endpoint->stage == Stage::closed) return;
  if (event.kind == EventKind::connected) on_link_open(*endpoint, *link);
  else if (event.kind == EventKind::message) on_rail_message(*endpoint, *link, event.message);
  else if (event.kind == EventKind::written) on_piece_landed(*endpoint, *link, event.value);
}

// ---- writes coming in

void StripedEngine::on_piece_landed(Endpoint& endpoint, Link& link, std::uint64_t tag) {
  link.landed.push_back(tag);
  if (link.landed.size() > wire::kMaxTags) link.landed.pop_front();
  count_in(endpoint, tag);
}

void StripedEngine::count_in(Endpoint& endpoint, std::uint64_t tag) {
  const std::uint64_t number = wire::number_of(tag), piece = tag & (wire::kMaxPieces - 1);
  if (endpoint.in.contains(number)) return;  // again, after a rail's end
  if (number >= endpoint.in.all_below + kMaxOpenWrites) return malformed(endpoint, "a piece of a write far ahead");
  Incoming& incoming = endpoint.incoming[number];
  if (incoming.landed.size() <= piece) incoming.landed.resize(piece + 1);
  if (incoming.landed[piece]) return;
  incoming.landed[piece] = true;
  ++incoming.count;
  settle_incoming(endpoint, number);
}

void StripedEngine::settle_incoming(Endpoint& endpoint, std::uint64_t number) {
  const Incoming& incoming = endpoint.incoming.at(number);
  if (!incoming.pieces) return;
  if (incoming.landed.size() > *incoming.pieces) return malformed(endpoint, "more pieces than it announced");
  if (incoming.count < *incoming.pieces) return;
  events_.emit({.kind = EventKind::written, .endpoint = endpoint.id, .value = *incoming.value});
  mark_in(endpoint, number);
}

void StripedEngine::mark_in(Endpoint& endpoint, std::uint64_t number) {
  endpoint.incoming.erase(number);
  endpoint.in.add(number);
  deliver_kept(endpoint, endpoint.in.all_below);
}

// ---- operations going out

Result<> StripedEngine::write(EndpointId id, std::span<const Write> writes) {
  auto found = find_for_posting(endpoints_, regions_, id, writes);
  if (!found) return tl::unexpected(found.error());
  Endpoint& endpoint = **found;
  now_ = clock_.now();  // see connect()
  for (const auto& write : writes) {
    Operation operation{.context = write.context, .local = write.local, .remote = write.remote, .length = write.length};
    if (write.notify) operation.number = endpoint.next_write++;
    const auto value = write.notify.value_or(0);
    const auto number = operation.number;
    post(endpoint, std::move(operation));
    if (number)
      send_control(endpoint, {.kind = wire::Kind::announce,
                              .a = *number,
                              .b = endpoint.operations.at(endpoint.next_operation - 1).unfinished,
                              .c = value});
  }
  pump(endpoint);
  return {};
}

Result<> StripedEngine::read(EndpointId id, std::span<const Read> reads) {
  auto found = find_for_posting(endpoints_, regions_, id, reads);
  if (!found) return tl::unexpected(found.error());
  now_ = clock_.now();  // see connect()
  for (const auto& read : reads)
    post(**found, {.context = read.context,
                   .is_read = true,
                   .on_each_rail = read.on_each_rail,
                   .local = read.local,
                   .remote = read.remote,
                   .length = read.length});
  pump(**found);
  return {};
}

void StripedEngine::post(Endpoint& endpoint, Operation operation) {
  const std::uint64_t even = round_up((operation.length + rails_.size() - 1) / rails_.size(), 4 * KiB);
  operation.piece_bytes = std::clamp<std::uint64_t>(even, options_.smallest_piece, options_.largest_piece);
  operation.piece_bytes = std::max(operation.piece_bytes, round_up(operation.length / wire::kMaxPieces + 1, 4 * KiB));
  const std::uint64_t pieces = (operation.length + operation.piece_bytes - 1) / operation.piece_bytes;
  operation.unfinished =
      static_cast<std::uint32_t>(operation.on_each_rail ? rails_.size() : std::max<std::uint64_t>(1, pieces));
  const std::uint64_t number = endpoint.next_operation++;
  const std::uint64_t key = operation.remote.region.key;
  endpoint.operations[number] = std::move(operation);
  if (endpoint.keys.size() > kMaxKeys && endpoint.operations.size() == 1)  // nothing under way needs them
    endpoint.keys.clear();
  auto [entry, unasked] = endpoint.keys.try_emplace(key);
  if (unasked) send_control(endpoint, {.kind = wire::Kind::ask, .a = key});
  if (entry->second.known) queue_pieces(endpoint, number);
  else entry->second.waiting.push_back(number);
}

void StripedEngine::queue_pieces(Endpoint& endpoint, std::uint64_t operation) {
  const auto found = endpoint.operations.find(operation);
  for (std::uint32_t i = 0; i < found->second.unfinished; ++i)
    endpoint.pending.push_back({.operation = operation, .index = i});
  touch(endpoint);
}

void StripedEngine::answer_keys(Endpoint& endpoint, const wire::Header& header, BytesView rest) {
  auto found = endpoint.keys.find(header.a);
  if (found == endpoint.keys.end() || found->second.known) return malformed(endpoint, "an answer to no question");
  const auto waiting = std::exchange(found->second.waiting, {});
  if (rest.empty()) {
    endpoint.keys.erase(found);
    for (auto operation : waiting) {
      endpoint.operations.at(operation).error = refusal_error(Regions::Refusal::bad_key);
      complete(endpoint, operation);
    }
    return;
  }
  for (wire::RailKey key; take(rest, key);) found->second.rails.push_back(key);
  found->second.rails.resize(endpoint.rails.size());  // the peer may have more or fewer rails
  found->second.known = true;
  for (auto operation : waiting) queue_pieces(endpoint, operation);
}

std::uint64_t StripedEngine::length_of(const Operation& operation, std::uint32_t piece) {
  if (operation.on_each_rail) return operation.length;
  return std::min(operation.piece_bytes, operation.length - piece * operation.piece_bytes);
}

// Its peer would forget that the oldest has landed, if it has, before we know.
bool StripedEngine::is_far_ahead(const Link& link) {
  return !link.in_flight.empty() && link.posted - link.in_flight.begin()->second.nth >= wire::kMaxAhead;
}

void StripedEngine::touch(Endpoint& endpoint) {
  if (!std::exchange(endpoint.dirty, true)) dirty_.push_back(endpoint.id);
}

// The rail with the least under way among those that reach both ends of the operation and have room, and are for what
// is of its size; of a piece that is one rail's, that one.
StripedEngine::Choice StripedEngine::choose_link(Endpoint& endpoint, const Operation& operation, std::uint32_t piece,
                                                 std::uint64_t length) {
  Choice choice;
  auto local = rail_regions_.find(operation.local.region.value);
  auto remote = endpoint.keys.find(operation.remote.region.key);
  if (local == rail_regions_.end() || remote == endpoint.keys.end()) return choice;
  for (const auto& rail : endpoint.rails) {
    Link* link = rail.link;
    if (link == nullptr || !link->open || !local->second[link->rail] || remote->second.rails[link->rail].usable == 0)
      continue;
    if (operation.on_each_rail && link->rail != piece) continue;
    if (!endpoint.blind.empty() &&
        endpoint.blind.contains({link->rail, operation.local.region.value, operation.remote.region.key}))
      continue;
    if (choice.reachable && operation.length < options_.least_bulk && is_for_bulk(link->rail)) continue;
    choice.reachable = true;
    if (link->bytes > 0 && link->bytes + length > options_.bytes_in_flight) continue;
    if (is_far_ahead(*link)) continue;
    if (choice.link != nullptr && link->bytes >= choice.link->bytes) continue;
    choice.link = link;
    choice.local = *local->second[link->rail];
    const wire::RailKey& key = remote->second.rails[link->rail];
    choice.remote = {key.key, key.length};
  }
  return choice;
}

// Posts pieces while rails have room, in one call a rail.
void StripedEngine::pump(Endpoint& endpoint) {
  while (endpoint.stage == Stage::open && endpoint.primary != kNoRail && !endpoint.pending.empty()) {
    Piece piece = endpoint.pending.front();
    auto found = endpoint.operations.find(piece.operation);
    REJOIN_CHECK(found != endpoint.operations.end(), "a piece of no operation");
    Operation& operation = found->second;
    const std::uint64_t length = length_of(operation, piece.index);
    const Choice choice = choose_link(endpoint, operation, piece.index, length);
    if (choice.link == nullptr && choice.reachable && !operation.error) break;
    endpoint.pending.pop_front();
    if (choice.link == nullptr && operation.on_each_rail && !operation.error) {
      finish_piece(endpoint, piece.operation, {});  // this rail is down, or has never written there
      continue;
    }
    if (choice.link == nullptr || operation.error) {
      finish_piece(
          endpoint, piece.operation,
          operation.error.value_or(Error{ErrorCode::cancelled, "the region was deregistered, or no rail reaches it"}));
      continue;
    }
    Link& link = *choice.link;
    piece.posted = now_;
    piece.nth = link.posted++;
    const std::uint64_t offset = operation.on_each_rail ? 0 : piece.index * operation.piece_bytes;
    const std::uint64_t number = endpoint.next_piece++;
    link.in_flight[number] = piece;
    link.bytes += length;
    ++operation.in_flight;
    const LocalRange local{choice.local, operation.local.offset + offset};
    const RemoteRange remote{choice.remote, operation.remote.offset + offset};
    Batch& batch = batches_[link.rail];
    if (std::exchange(batch.link, &link) == nullptr) batch.writes.clear(), batch.reads.clear();
    if (operation.is_read) {
      batch.reads.push_back({.context = number, .local = local, .remote = remote, .length = length});
    } else {
      Write write{.context = number, .local = local, .remote = remote, .length = length};
      if (operation.number) write.notify = wire::piece_tag(*operation.number, piece.index);
      batch.writes.push_back(write);
    }
  }
  for (auto& batch : batches_) {
    Link* link = std::exchange(batch.link, nullptr);
    if (link == nullptr) continue;
    Engine& rail = *rails_[link->rail];
    Result<> posted;
    if (!batch.writes.empty()) posted = rail.write(link->endpoint, batch.writes);
    const bool wrote = posted.has_value();
    if (wrote && !batch.reads.empty()) posted = rail.read(link->endpoint, batch.reads);
    if (posted) continue;
    if (!link->ended) end_link(endpoint, *link, posted.error().message);
    // What was not posted has no completion to wait for.
    const auto never = [&, &unposted = *link](const auto& operations) {
      for (const auto& one : operations) on_piece_done(endpoint, unposted, one.context, posted.error());
    };
    if (!wrote) never(batch.writes);
    never(batch.reads);
  }
}

void StripedEngine::on_piece_done(Endpoint& endpoint, Link& link, std::uint64_t number,
                                  const std::optional<Error>& error) {
  auto taken = link.in_flight.extract(number);
  if (taken.empty()) return;
  const Piece piece = taken.mapped();
  Operation& operation = endpoint.operations.at(piece.operation);
  link.bytes -= length_of(operation, piece.index);
  --operation.in_flight;
  if (link.ended) to_sweep_ = true;
  if (endpoint.stage != Stage::open) {
    if (operation.in_flight == 0) complete(endpoint, piece.operation);
    return;
  }
  touch(endpoint);
  if (!error) {
    if (operation.number) {
      const std::uint64_t tag = wire::piece_tag(*operation.number, piece.index);
      if (link.ended) report_landed(endpoint, link, {tag});
      else link.completed.push_back(tag);
    }
    link.last_finished = now_;
    endpoint.rails[link.rail].backoff = options_.first_retry;
    return finish_piece(endpoint, piece.operation, {});
  }
  const bool withdrawn = !rail_regions_.contains(operation.local.region.value);
  if (error->code == ErrorCode::refused || withdrawn) return finish_piece(endpoint, piece.operation, error);
  if (error->code == ErrorCode::unreachable) return avoid(endpoint, link, piece, *error);
  // The rail failed it. Before its end is known here it may still deliver: take it out first.
  if (operation.is_read || link.peer_fenced) post_again(endpoint, link, piece);
  else link.orphans.push_back(piece);
  if (!link.ended) end_link(endpoint, link, error->message);
}

// Over another rail; unless it has landed before its own was fenced.
void StripedEngine::post_again(Endpoint& endpoint, const Link& link, const Piece& piece) {
  const Operation& operation = endpoint.operations.at(piece.operation);
  if (operation.number && link.landed_there.contains(wire::piece_tag(*operation.number, piece.index)))
    return finish_piece(endpoint, piece.operation, {});
  endpoint.pending.push_front(piece);
}

// The rail is sound and was not fenced, but it can't get at this memory: from now on others carry what is between the
// two regions. It has ended the piece itself, so nothing of it lands any more.
void StripedEngine::avoid(Endpoint& endpoint, const Link& link, const Piece& piece, const Error& error) {
  const Operation& operation = endpoint.operations.at(piece.operation);
  if (endpoint.blind.size() >= kMaxKeys) endpoint.blind.clear();  // learned again
  if (endpoint.blind.insert({link.rail, operation.local.region.value, operation.remote.region.key}).second)
    logger().warn("rail {} is not used between two regions any more: {}", link.rail, error.message);
  if (operation.on_each_rail) return finish_piece(endpoint, piece.operation, {});  // it has never written there
  if (choose_link(endpoint, operation, piece.index, 0).reachable) endpoint.pending.push_front(piece);
  else finish_piece(endpoint, piece.operation, error);
}

void StripedEngine::finish_piece(Endpoint& endpoint, std::uint64_t number, const std::optional<Error>& error) {
  Operation& operation = endpoint.operations.at(number);
  if (error && !operation.error) operation.error = error;
  if (--operation.unfinished == 0) complete(endpoint, number);
}

void StripedEngine::complete(Endpoint& endpoint, std::uint64_t number) {
  const auto operation = endpoint.operations.extract(number);
  if (operation.mapped().error && operation.mapped().number && endpoint.stage == Stage::open)
    send_control(endpoint, {.kind = wire::Kind::withdraw, .a = *operation.mapped().number});
  if (operation.mapped().number) endpoint.over.add(*operation.mapped().number);
  events_.emit({.kind = EventKind::completed,
                .endpoint = endpoint.id,
                .value = operation.mapped().context,
                .error = operation.mapped().error});
}

}  // namespace rejoin::transport::striped
