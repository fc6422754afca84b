// What moves: messages, what goes out, and the copies between slots and the device.
#include <algorithm>

#include "transport/endpoints.h"
#include "transport/staged/engine.h"
#include "transport/staged/status.h"

namespace rejoin::transport::staged {

namespace {

constexpr std::size_t kRoom = Engine::kMaxMessage - sizeof(wire::Header);

}  // namespace

// ---- messages

// Refused below: the endpoint is about to report its end.
void StagedEngine::send_control(EndpointId endpoint, wire::Kind kind, BytesView rest, std::uint32_t more) {
  (void)below_->send(endpoint, joined(wire::Header{.kind = kind, .more = more}, rest));
}

Result<> StagedEngine::send(EndpointId id, BytesView message) {
  if (auto endpoint = find_open_endpoint(endpoints_, id); !endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  for (; message.size() > kRoom; message = message.subspan(kRoom))
    send_control(id, wire::Kind::message, message.first(kRoom), 1);
  send_control(id, wire::Kind::message, message);
  return {};
}

void StagedEngine::on_message(Endpoint& endpoint, BytesView bytes) {
  wire::Header header;
  if (!take(bytes, header)) return malformed(endpoint, "a message too short for its header");
  if ((header.kind == wire::Kind::hello) != (endpoint.stage == Stage::accepting))
    return malformed(endpoint, "a hello out of place, or none");
  const auto whole = [&](auto& what) { return take(bytes, what) && bytes.empty(); };
  wire::Answer answer;
  switch (header.kind) {
    case wire::Kind::hello:
      endpoint.stage = Stage::open;
      return events_.emit({.kind = EventKind::accepted, .endpoint = endpoint.id}, bytes);
    case wire::Kind::message:
      if (!endpoint.parts.add(bytes, header.more != 0, endpoint.id, events_))
        malformed(endpoint, "a message over the limit");
      return;
    case wire::Kind::offer: {
      wire::Offer offer;
      if (!whole(offer) || offer.fragments == 0 || endpoint.pulls >= kMaxUnderWay) break;
      return on_offer(endpoint, offer);
    }
    case wire::Kind::request: {
      wire::Request request;
      if (!whole(request) || operations_.size() >= kMaxUnderWay) break;
      return on_request(endpoint, request);
    }
    case wire::Kind::landed:
      if (!whole(answer)) break;
      return on_landed(endpoint, answer);
    case wire::Kind::answered: {
      if (!whole(answer)) break;
      auto found = operations_.find(answer.number);
      if (found == operations_.end()) break;
      if (found->second.endpoint != endpoint.id || !found->second.is_read) break;
      if (!found->second.error) found->second.error = error_of(answer.status);
      return complete(answer.number);
    }
    case wire::Kind::withdrawn:
      if (!whole(answer)) break;
      endpoint.arriving.erase(answer.number);
      return;
  }
  malformed(endpoint, "a message that can't be");
}

// ---- out

template <typename One>
Result<> StagedEngine::hand_through(EndpointId id, std::span<const One> operations, std::vector<const One*>& staged,
                                    Result<> (Engine::*verb)(EndpointId, std::span<const One>)) {
  if (auto endpoint = find_for_posting(endpoints_, regions_, id, operations); !endpoint)
    return tl::unexpected(endpoint.error());
  std::vector<One> direct;
  for (const auto& one : operations) {
    const auto below = below_of(one.local.region);
    if (!below || wire::is_staged(one.remote.region.key)) {
      staged.push_back(&one);
      continue;
    }
    direct.push_back(one);
    direct.back().local.region = *below;
    direct.back().context = below_operations_.add({.context = one.context});
  }
  if (direct.empty()) return {};
  auto posted = (below_.get()->*verb)(id, direct);
  if (!posted)
    for (const auto& one : direct) below_operations_.erase(one.context);
  return posted;
}

Result<> StagedEngine::write(EndpointId id, std::span<const Write> writes) {
  std::vector<const Write*> staged;
  if (auto posted = hand_through(id, writes, staged, &Engine::write); !posted) return posted;
  for (const auto* write : staged)
    post({.endpoint = id,
          .context = write->context,
          .local = write->local,
          .remote = write->remote,
          .length = write->length,
          .notify = write->notify});
  pump();
  return {};
}

Result<> StagedEngine::read(EndpointId id, std::span<const Read> reads) {
  std::vector<const Read*> staged;
  if (auto posted = hand_through(id, reads, staged, &Engine::read); !posted) return posted;
  for (const auto* read : staged) {
    const std::uint64_t number = ++operations_made_;
    operations_[number] = {.endpoint = id,
                           .context = read->context,
                           .is_read = true,
                           .local = read->local,
                           .remote = read->remote,
                           .length = read->length};
    send_struct(id, wire::Kind::request,
                wire::Request{.number = number,
                              .source = read->remote.region,
                              .source_offset = read->remote.offset,
                              .target = remote(read->local.region),
                              .target_offset = read->local.offset,
                              .length = read->length});
  }
  return {};
}

void StagedEngine::on_request(Endpoint& endpoint, const wire::Request& request) {
  const auto status =
      status_of(regions_.check(request.source.key, request.source_offset, request.length, Access::remote_read));
  if (status != wire::Status::done)
    return send_struct(endpoint.id, wire::Kind::answered, wire::Answer{request.number, status});
  post({.endpoint = endpoint.id,
        .request = request.number,
        .local = {regions_.by_key(request.source.key)->id, request.source_offset},
        .remote = {request.target, request.target_offset},
        .length = request.length});
}

void StagedEngine::post(Operation operation) {
  const auto source = source_of(operation.local.region);
  if (source) operation.source = *source;
  else operation.error = source.error();
  const std::uint64_t fragments = (operation.length + options_.slot_bytes - 1) / options_.slot_bytes;
  operation.fragments = !operation.source ? std::max<std::uint64_t>(1, fragments) : 1;
  const std::uint64_t number = ++operations_made_;
  operations_[number] = std::move(operation);
  to_offer_.push_back(number);
}

void StagedEngine::pump() {
  const auto begin = [&](std::deque<std::uint64_t>& waiting, bool (StagedEngine::*next)(std::uint64_t)) {
    for (std::size_t n = waiting.size(); n > 0; --n) {
      const std::uint64_t number = waiting.front();
      waiting.pop_front();
      if (!(this->*next)(number)) waiting.push_back(number);
    }
  };
  begin(to_offer_, &StagedEngine::offer_next);
  begin(to_pull_, &StagedEngine::pull_next);
}

// As many fragments as there are slots for; true: there is nothing left to begin.
bool StagedEngine::offer_next(std::uint64_t number) {
  auto found = operations_.find(number);
  if (found == operations_.end()) return true;
  Operation& operation = found->second;
  Endpoint& endpoint = *find(operation.endpoint);
  while (operation.begun < operation.fragments) {
    if (operation.error) {  // the rest does not go
      operation.ended += operation.fragments - operation.begun;
      operation.begun = operation.fragments;
      if (operation.ended == operation.fragments) complete(number);
      return true;
    }
    const std::uint64_t from = operation.begun * options_.slot_bytes;
    const std::uint64_t length =
        operation.source ? operation.length : std::min<std::uint64_t>(options_.slot_bytes, operation.length - from);
    wire::Offer offer{.write = number,
                      .fragments = operation.fragments,
                      .notifies = operation.notify ? 1u : 0u,
                      .notification = operation.notify.value_or(0),
                      .answers = operation.request.value_or(0),
                      .target = operation.remote.region,
                      .target_offset = operation.remote.offset + from,
                      .length = length,
                      .write_offset = operation.remote.offset,
                      .write_length = operation.length};
    if (operation.source || length == 0) {
      if (operation.source) offer.source = below_->remote(*operation.source);
      offer.source_offset = operation.local.offset;
      offer.number = ++offers_made_;
      offered_[offer.number] = {.operation = number, .slot = std::nullopt, .sent = true};
      send_struct(operation.endpoint, wire::Kind::offer, offer);
      ++operation.begun;
      continue;
    }
    // Half of the slots are the most for one peer: one that takes nothing does not stop the others.
    if (out_.free.empty() || endpoint.slots >= options_.slots / 2) return false;
    const std::uint32_t slot = out_.free.back();
    const auto copy =
        out_.copier->copy(out_.at(slot, options_.slot_bytes),
                          regions_.find(operation.local.region)->memory.data() + operation.local.offset + from, length);
    if (!copy) {
      operation.error = copy.error();
      continue;
    }
    out_.free.pop_back();
    ++endpoint.slots;
    offer.source = below_->remote(out_.region);
    offer.source_offset = slot * options_.slot_bytes;
    offer.number = ++offers_made_;
    offered_[offer.number] = {.operation = number, .slot = slot};
    out_.copies.push_back({.number = *copy,
                           .endpoint = operation.endpoint,
                           .region = operation.local.region,
                           .slot = slot,
                           .offer = offer});
    ++operation.begun;
  }
  return true;
}

void StagedEngine::on_landed(Endpoint& endpoint, const wire::Answer& answer) {
  auto found = offered_.find(answer.number);
  if (found == offered_.end() || !found->second.sent || operations_.at(found->second.operation).endpoint != endpoint.id)
    return malformed(endpoint, "news of an offer that was not made");
  const Offered offered = found->second;
  offered_.erase(found);
  if (offered.slot) {
    out_.free.push_back(*offered.slot);
    --endpoint.slots;
  }
  finish_fragment(offered.operation, error_of(answer.status));
}

void StagedEngine::finish_fragment(std::uint64_t number, const std::optional<Error>& error) {
  Operation& operation = operations_.at(number);
  if (error && !operation.error) operation.error = error;
  if (++operation.ended == operation.fragments) complete(number);
}

void StagedEngine::complete(std::uint64_t number) {
  const Operation operation = std::move(operations_.extract(number).mapped());
  if (operation.error && operation.fragments > 1)
    send_struct(operation.endpoint, wire::Kind::withdrawn, wire::Answer{number, wire::Status::withdrawn});
  if (operation.request)
    return send_struct(operation.endpoint, wire::Kind::answered,
                       wire::Answer{*operation.request, status_of(operation.error)});
  events_.emit({.kind = EventKind::completed,
                .endpoint = operation.endpoint,
                .value = operation.context,
                .error = operation.error});
}

// ---- copies

void StagedEngine::advance(Lane& lane) {
  if (lane.copies.empty()) return;
  const auto done = lane.copier->done();
  if (done) {
    while (!lane.copies.empty() && lane.copies.front().number <= *done) finish_copy(lane, {});
  } else {
    while (!lane.copies.empty()) finish_copy(lane, done.error());
  }
}

void StagedEngine::finish_copy(Lane& lane, const std::optional<Error>& error) {
  const Copy copy = std::move(lane.copies.front());
  lane.copies.pop_front();
  if (&lane == &in_) {
    in_.free.push_back(copy.slot);
    auto found = pulls_.find(copy.pull);
    if (found == pulls_.end()) return;
    --found->second.under_way;
    if (error) found->second.status = wire::Status::device_failed;
    return settle_pull(copy.pull);
  }
  auto offered = offered_.find(copy.offer.number);
  const std::uint64_t number = offered->second.operation;
  if (!error && !operations_.at(number).error) {
    offered->second.sent = true;
    return send_struct(copy.endpoint, wire::Kind::offer, copy.offer);
  }
  offered_.erase(offered);
  out_.free.push_back(copy.slot);
  --find(copy.endpoint)->slots;
  finish_fragment(number, error);
}

void StagedEngine::wait_for_copies(const std::function<bool(const Copy&)>& which) {
  for (Lane* lane : {&out_, &in_}) {
    if (std::none_of(lane->copies.begin(), lane->copies.end(), which)) continue;
    if (auto done = lane->copier->finish(); !done)
      while (!lane->copies.empty()) finish_copy(*lane, done.error());
    else advance(*lane);
  }
}

}  // namespace rejoin::transport::staged
