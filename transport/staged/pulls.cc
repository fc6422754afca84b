// What comes in: offers of peers, which are pulled.
#include "transport/endpoints.h"
#include "transport/staged/engine.h"
#include "transport/staged/status.h"

namespace rejoin::transport::staged {

// What a read of ours has asked for lands where we have said, in whatever region of ours.
Regions::Refusal StagedEngine::may_land(const Endpoint& endpoint, const wire::Offer& offer) {
  Access needed = Access::remote_write;
  if (offer.answers != 0) {
    const auto asked = operations_.find(offer.answers);
    const Region* region = regions_.by_key(offer.target.key);
    const bool known = asked != operations_.end() && asked->second.is_read && asked->second.endpoint == endpoint.id &&
                       region != nullptr && region->id == asked->second.local.region;
    const bool there =
        known && asked->second.local.offset == offer.write_offset && asked->second.length == offer.write_length;
    if (!there) {
      const auto refusal = known ? Regions::Refusal::bad_range : Regions::Refusal::bad_key;
      regions_.count(refusal);
      return refusal;
    }
    needed = Access::local;
  }
  const auto refusal = regions_.check(offer.target.key, offer.write_offset, offer.write_length, needed);
  if (refusal != Regions::Refusal::none) return refusal;
  if (in_range(offer.target_offset - offer.write_offset, offer.length, offer.write_length)) return refusal;
  regions_.count(Regions::Refusal::bad_range);
  return Regions::Refusal::bad_range;
}

void StagedEngine::on_offer(Endpoint& endpoint, const wire::Offer& offer) {
  Pull pull{.endpoint = endpoint.id, .offer = offer};
  pull.status = status_of(may_land(endpoint, offer));
  if (const Region* target = regions_.by_key(offer.target.key)) pull.target = target->id;
  const std::uint64_t number = ++pulls_made_;
  ++endpoint.pulls;
  pulls_[number] = std::move(pull);
  to_pull_.push_back(number);
}

// As many fragments as there are slots for; true: there is nothing left to begin.
bool StagedEngine::pull_next(std::uint64_t number) {
  auto found = pulls_.find(number);
  if (found == pulls_.end()) return true;
  Pull& pull = found->second;
  const auto read = [&](Below what, const LocalRange& local) {
    const Read one{.context = below_operations_.add(what),
                   .local = local,
                   .remote = {pull.offer.source, pull.offer.source_offset + what.offset},
                   .length = what.length};
    const bool posted = below_->read(pull.endpoint, {&one, 1}).has_value();
    if (!posted) {
      below_operations_.erase(one.context);
      pull.status = wire::Status::not_read;  // the endpoint is about to report its end
      return false;
    }
    pull.begun += what.length;
    ++pull.under_way;
    return true;
  };
  while (pull.status == wire::Status::done && pull.begun < pull.offer.length) {
    if (const auto below = below_of(pull.target)) {
      (void)read({.pull = number, .length = pull.offer.length}, {*below, pull.offer.target_offset});
      break;
    }
    if (in_.free.empty() || pull.under_way >= options_.slots / 2) return false;
    const std::uint32_t slot = in_.free.back();
    const std::uint64_t length = std::min<std::uint64_t>(options_.slot_bytes, pull.offer.length - pull.begun);
    if (!read({.pull = number, .slot = slot, .offset = pull.begun, .length = length},
              {in_.region, slot * options_.slot_bytes}))
      break;
    in_.free.pop_back();
  }
  settle_pull(number);
  return true;
}

void StagedEngine::on_completed(const Event& event) {
  const auto below = below_operations_.remove(event.value);
  if (!below) return;
  if (below->context)
    return events_.emit(
        {.kind = EventKind::completed, .endpoint = event.endpoint, .value = *below->context, .error = event.error});
  auto found = pulls_.find(below->pull);
  if (found == pulls_.end()) {  // its endpoint is gone
    if (below->slot) in_.free.push_back(*below->slot);
    return;
  }
  Pull& pull = found->second;
  if (event.error && pull.status == wire::Status::done)
    pull.status = event.error->code == ErrorCode::refused ? wire::Status::withdrawn : wire::Status::not_read;
  if (below->slot && pull.status == wire::Status::done) {
    std::byte* to = regions_.find(pull.target)->memory.data() + pull.offer.target_offset + below->offset;
    if (const auto copy = in_.copier->copy(to, in_.at(*below->slot, options_.slot_bytes), below->length); copy) {
      in_.copies.push_back({.number = *copy,
                            .endpoint = pull.endpoint,
                            .region = pull.target,
                            .slot = *below->slot,
                            .offer = {},
                            .pull = below->pull});
      return;
    }
    pull.status = wire::Status::device_failed;
  }
  if (below->slot) in_.free.push_back(*below->slot);
  --pull.under_way;
  settle_pull(below->pull);
}

// Ends the pull, if all of it has.
void StagedEngine::settle_pull(std::uint64_t number) {
  auto found = pulls_.find(number);
  const Pull& now = found->second;
  if (now.under_way > 0 || (now.status == wire::Status::done && now.begun < now.offer.length)) return;
  const Pull pull = std::move(pulls_.extract(found).mapped());
  Endpoint* endpoint = find(pull.endpoint);
  if (endpoint == nullptr || endpoint->stage == Stage::failed) return;
  --endpoint->pulls;
  const wire::Offer& offer = pull.offer;
  if (pull.status == wire::Status::done) {
    bool whole = offer.fragments == 1;
    if (!whole && (whole = ++endpoint->arriving[offer.write] == offer.fragments)) endpoint->arriving.erase(offer.write);
    if (endpoint->arriving.size() > kMaxUnderWay) return malformed(*endpoint, "too many writes that are not complete");
    if (whole && offer.notifies != 0)
      events_.emit({.kind = EventKind::written, .endpoint = endpoint->id, .value = offer.notification});
  }
  send_struct(endpoint->id, wire::Kind::landed, wire::Answer{offer.number, pull.status});
}

}  // namespace rejoin::transport::staged
