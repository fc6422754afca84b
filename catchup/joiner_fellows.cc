// Other joiners, which pass on what they have proven. What they say decides who is asked, and nothing else. And who
// stands still, of these and of sources.
#include <algorithm>

#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "catchup/joiner.h"
#include "catchup/pause.h"

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
  if (auto known = sources_.find(source); known != sources_.end()) known->second.moved_at = now_;
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
  if (is_pause(paused, silence_)) {
    later(came_at_);
    for (auto& [id, fellow] : fellows_) later(fellow.moved_at);
    for (auto& [id, source] : sources_) later(source.moved_at);
  }
  if (paused <= silence_) return;  // a source is waited for much longer, and meanwhile there may be little to look at
  for (auto& [id, source] : expected_) {
    later(source.connected_at);
    if (source.missing_since) later(*source.missing_since);
  }
}

// Over a slow link slices come seldom, and in turn from all.
Duration Joiner::patience(Duration shortest) const {
  const auto all = static_cast<std::int64_t>(sources_.size() + fellows_.size());
  return std::max(shortest, kUsual * all * usual());
}

// Before anything has come it is not known how slow the link is over which all send at once.
Duration Joiner::patience_at_first(Duration shortest) const {
  if (bytes_ > 0) return shortest;
  const auto sending =
      std::ranges::count_if(sources_, [&](const auto& source) { return planner_.under_way(source.first) > 0; });
  return shortest * std::max<std::int64_t>(1, sending);
}

// Nobody is waited for that owes something and sends nothing.
void Joiner::mind_fellows(TimePoint now) {
  const Duration longest = patience(deadlines::kStillFellow.of(silence_));
  for (const auto& [id, fellow] : fellows_)
    if (planner_.under_way(id) > 0 && now - fellow.moved_at > longest)
      give_up(id, "it has sent nothing for too long", false);
}

// See "Sources that stand still" in docs/design-notes.md.
void Joiner::mind_sources(TimePoint now) {
  const Duration usually = patience(patience_at_first(deadlines::kUnreachableSource.of(silence_)));
  for (auto& [id, known] : expected_) advise(id, known, usually);
  for (auto& [id, source] : sources_) {
    if (!owes(id)) {
      source.moved_at = now;
      continue;
    }
    const Duration still = now - source.moved_at;
    if (source.gives_signs && !source.asked_at && still > deadlines::kSignOfSource.of(silence_)) ask_for_sign(source);
    const auto known = expected_.find(id);
    if (source.older || still <= (known == expected_.end() ? usually : usually * known->second.doubled)) continue;
    give_up(id, fmt::format("its daemon's catch-up thread stands still: no sign of it for {:.1f} s", seconds(still)),
            false);
    if (known == expected_.end()) continue;
    const bool waited = waited_for(known->second);
    known->second.missing_since = source.moved_at;
    known->second.stood_still = true;
    if (!waited) continue;
    logger().warn(
        "the state is not compared with replica {}'s before it is heard again: its daemon's catch-up thread has given "
        "no sign for {:.1f} s; it is called again",
        id, seconds(still));
    recheck_verified();
  }
}

// Over a slow link a sign may have been behind what others sent: over a second connection nothing is before it.
void Joiner::advise(ReplicaId source, Expected& known, Duration usually) {
  if (!known.stood_still || known.advised || !known.missing_since) return;
  const Duration still = now_ - *known.missing_since;
  if (still <= 2 * usually * known.doubled) return;
  known.advised = true;
  logger().warn(
      "replica {}'s daemon's catch-up thread has given no sign for {:.1f} s, nor when it was called again; if that "
      "lasts, end that daemon, and it is started again",
      source, seconds(still));
}

// One question is under way at a time, so that nothing piles up at one who stands still.
void Joiner::ask_for_sign(Source& source) {
  source.asked_at = now_;
  proto::Stream message;
  message.mutable_fetch()->set_sign(true);
  (void)send(source.endpoint, message);  // a failed connection ends in on_source_down
}

// Where it is of an older release this is what it answers: to a question that is not about anything, and which needs
// none of its trainer.
void Joiner::ask_for_any_answer(const Source& source) {
  if (verified_.empty()) return;
  proto::Stream message;
  message.mutable_verify()->add_slices(0);  // in no request, and at version 0, which is past most often
  (void)send(source.endpoint, message);     // a failed connection ends in on_source_down
}

bool Joiner::owes(ReplicaId source) const {
  return planner_.under_way(source) > 0 || std::ranges::any_of(questions_, [&](const Question& question) {
           const auto asked = question.asked.find(source);
           return asked != question.asked.end() && !asked->second.over;
         });
}

// Its transport may take the call although it stands.
bool Joiner::stands_still(ReplicaId source) const {
  const auto known = expected_.find(source);
  return known != expected_.end() && known->second.stood_still;
}

void Joiner::give_up(ReplicaId source, std::string why, bool wrong) {
  for (const auto& known : given_up_)
    if (known.source == source) return;
  given_up_.push_back({source, std::move(why), wrong});
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
