// Other joiners, which pass on what they have proven. What they say decides who is asked, and nothing else.
#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "catchup/joiner.h"

namespace rejoin::catchup {

void Joiner::on_fellow_up(ReplicaId fellow, transport::EndpointId endpoint) {
  fellows_[fellow] = {.endpoint = endpoint, .moved_at = now_};
  events::record(events::Kind::source_up, {.replica = fellow.value});
  planner_.on_fellow_up(fellow);
  proto::Stream message;
  message.mutable_follow();
  (void)send(endpoint, message);  // a failed connection ends in on_source_down
}

Result<> Joiner::on_offers(ReplicaId fellow, const proto::Offers& offers) {
  for (auto slice : offers.slices()) {
    if (slice >= verified_.size())
      return fail(ErrorCode::corrupt, "another joiner offers slice {} of {}", slice, verified_.size());
    planner_.on_offered(fellow, slice);
  }
  return {};
}

// It sends what it was asked for.
void Joiner::heard_of(ReplicaId source) {
  came_at_ = now_;
  if (auto fellow = fellows_.find(source); fellow != fellows_.end()) fellow->second.moved_at = now_;
}

// Up to the last time that anything came: a wait that is under way would otherwise be usual itself.
Duration Joiner::usual() const {
  return planner_.arrived() == 0 ? Duration{} : (came_at_ - started_) / planner_.arrived();
}

// What this process itself was paused for counts for nobody: what they sent meanwhile may not have been looked at, and
// whose connection broke meanwhile could not be connected with again.
void Joiner::make_up_for_pause(TimePoint now) {
  const Duration paused = now - now_;
  const auto later = [&](TimePoint& at) { at = std::min(at + paused, now); };
  if (paused > deadlines::kIdleStream.of(silence_)) {
    later(came_at_);
    for (auto& [id, fellow] : fellows_) later(fellow.moved_at);
  }
  if (paused <= silence_) return;  // a source is waited for much longer, and meanwhile there may be little to look at
  for (auto& [id, source] : expected_) {
    later(source.connected_at);
    if (source.missing_since) later(*source.missing_since);
  }
}

// Nobody is waited for that owes something and sends nothing.
void Joiner::mind_fellows(TimePoint now) {
  // Over a slow link slices come seldom, and in turn from all.
  const auto all = static_cast<std::int64_t>(sources_.size() + fellows_.size());
  const Duration patience = std::max(deadlines::kStillFellow.of(silence_), kUsual * all * usual());
  for (const auto& [id, fellow] : fellows_)
    if (planner_.under_way(id) > 0 && now - fellow.moved_at > patience)
      give_up(id, "it has sent nothing for too long", false);
}

void Joiner::give_up(ReplicaId fellow, std::string why, bool wrong) {
  for (const auto& known : given_up_)
    if (known.fellow == fellow) return;
  given_up_.push_back({fellow, std::move(why), wrong});
}

// Who has sent something that is not what contributors have, as a digest of theirs has shown (`source` is empty), is
// asked for nothing any more. What was damaged on its way may be the way's fault, or this process's own: who has sent
// it is asked again after a while.
void Joiner::sent_wrong(std::uint32_t slice, std::optional<ReplicaId> source) {
  const bool damaged = source.has_value();
  if (const auto from = came_from_.find(slice); !damaged && from != came_from_.end()) source = from->second;
  if (source && fellows_.contains(*source))
    give_up(*source, damaged ? "what it has sent came damaged" : "what it has sent is wrong", !damaged);
}

}  // namespace rejoin::catchup
