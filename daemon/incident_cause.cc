// Who it was that ended, stood still or was cut off, by what the processes themselves, their daemons and the
// coordinator say.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>

#include "daemon/incident_story.h"
#include "daemon/incident_words.h"

namespace rejoin::daemon {

namespace {

// 0: it is of none. A daemon says it in words.
std::int64_t pause_of(const RecordedEvent& event) {
  unsigned long long milliseconds = 0;
  if (event.kind == events::Kind::paused) return nanoseconds(event.numbers.a);
  if (event.kind != events::Kind::warning ||
      std::sscanf(event.text.c_str(), "this daemon was paused for %12llu ms", &milliseconds) != 1)
    return 0;
  return nanoseconds(milliseconds * kMillisecond);
}

}  // namespace

bool IncidentStory::is_lost(std::uint32_t replica) const { return std::ranges::count(incident_.lost, replica) > 0; }

// The process that a daemon's rank_down is of. In containers pids repeat: it is the one that was opened last by then.
const Recording* IncidentStory::trainer_of(const Found& down) const {
  const auto& said = down.event->numbers;
  const Recording* trainer = nullptr;
  for (const auto& one : recordings_.all)
    if (one.pid == said.a && place_of(one) == std::pair(said.replica, said.number) && one.clock == down.in->clock &&
        one.opened_ns != 0 && !one.events.empty() && one.events.front().at <= down.event->at &&
        (!trainer || one.opened_ns > trainer->opened_ns))
      trainer = &one;
  return trainer;
}

// Whether this is said of a process whose end changes nothing: of one that asked for a place that another one had, or
// that another one has followed. Of one without a recording that is not known.
bool IncidentStory::of_a_stranger(const Found& down) const {
  const Recording* one = trainer_of(down);
  if (one == nullptr) return false;
  const std::int64_t until = down.event->at + 2 * recordings_.clock_error;
  const auto incarnation = [until](const Recording& of) {
    std::uint64_t last = 0;
    for (const auto& event : of.events)
      if (event.kind == events::Kind::registered && event.at <= until) last = std::max(last, event.numbers.a);
    return last;
  };
  return !took_part(*one) || std::ranges::any_of(recordings_.all, [&](const Recording& other) {
    return place_of(other) == place_of(*one) && incarnation(other) > incarnation(*one);
  });
}

// The first word of a daemon that a process of a lost replica is gone. Where it is not known of a process whether it
// was a member, it is the one that the decision names.
IncidentStory::Found IncidentStory::first_gone(events::Kind kind) const {
  const auto* decided = decision();
  const auto gone = [&](bool known_or_named) {
    return first(since_, incident_.at + kSecond / 20, [&](const Recording& in, const RecordedEvent& event) {
      if (event.kind != kind || !is_lost(event.numbers.replica) || of_a_stranger({&in, &event})) return false;
      return !known_or_named || trainer_of({&in, &event}) != nullptr ||
             (decided != nullptr && decided->reason.find(event.first_text()) != std::string::npos);
    });
  };
  const auto found = gone(true);
  return found ? found : gone(false);
}

// Whether somebody has said of one of its processes, or of its daemon, that it is gone.
bool IncidentStory::end_is_known(std::uint32_t replica) const {
  const auto served = [&](const Recording& one) {
    const auto place = place_of(one);
    return place ? place->first == replica : std::ranges::any_of(one.events, [&](const RecordedEvent& event) {
      return event.kind == events::Kind::rank_up && event.numbers.replica == replica;
    });
  };
  if (std::ranges::any_of(incident_.ended, [&](const Recording* one) { return served(*one); })) return true;
  return bool(first(since_, incident_.at + kSecond / 20, [&](const Recording& in, const RecordedEvent& event) {
    return (event.kind == events::Kind::rank_down || event.kind == events::Kind::rank_left) &&
           event.numbers.replica == replica && !of_a_stranger({&in, &event});
  }));
}

// Those to which its ranks came last.
std::set<const Recording*> IncidentStory::daemons_of(std::uint32_t replica) const {
  std::map<std::uint32_t, Found> last;
  for (const auto& one : recordings_.all)
    for (const auto& event : one.events)
      if (event.kind == events::Kind::rank_up && event.numbers.replica == replica && event.at <= incident_.at)
        if (auto& known = last[event.numbers.number]; !known || event.at > known.event->at) known = {&one, &event};
  std::set<const Recording*> daemons;
  for (const auto& [rank, up] : last) daemons.insert(up.in);
  return daemons;
}

// The last word for whether a connection is there: nothing where that is `up`.
IncidentStory::Found IncidentStory::lost_last(events::Kind lost, events::Kind up, const Recording* only,
                                              const std::string& name) const {
  Found last;
  for (const auto& one : recordings_.all) {
    if (only != nullptr && &one != only) continue;
    for (const auto& event : one.events)
      if ((event.kind == lost || event.kind == up) && event.at > incident_.at - kMostToDecide &&
          event.at < incident_.at + kSecond / 20 && (name.empty() || event.first_text() == name) &&
          (!last || event.at >= last.event->at))
        last = {&one, &event};
  }
  return last && last.event->kind == lost ? last : Found{};
}

// Why the coordinator heard nothing of a replica whose processes may well have lived.
std::optional<IncidentStory::Cause> IncidentStory::what_cut_off(const Recording& daemon) const {
  for (const auto& event : daemon.events)
    if (const auto pause = pause_of(event);
        pause > 0 && event.at >= incident_.at - kSecond && event.at - pause <= incident_.at)
      return Cause{&daemon, event.at - pause,
                   fmt::format("{} stood still for {}: its last sign of life was at {}, and then it went on",
                               process_of(daemon), lasting(pause), clock(event.at - pause))};
  using enum events::Kind;
  const auto* end = find_event(daemon, ended, incident_.at - kMostToDecide, incident_.at);
  if (end != nullptr)
    return Cause{&daemon, end->at,
                 fmt::format("{} ended at {}: {}", process_of(daemon), clock(end->at), short_text(end->text))};
  if (const auto lost = lost_last(node_lost, node_up, nullptr, daemon.who)) {
    const auto* sign = last_before(daemon, std::min(lost.event->at, incident_.at));
    const bool stands = daemon.lives && last_event(daemon) <= incident_.at;
    return Cause{&daemon, sign != nullptr ? sign->at : lost.event->at,
                 fmt::format("{} was lost at {}: {}{}", process_of(daemon), clock(lost.event->at),
                             short_text(lost.event->more_text()),
                             stands ? "; it has given no sign of life since, and its process is still there" : "")};
  }
  if (const auto lost = lost_last(coordinator_lost, coordinator_up, &daemon))
    return Cause{&daemon, lost.event->at,
                 fmt::format("{} lost the coordinator at {}: {}; it was not back by then", process_of(daemon),
                             clock(lost.event->at), short_text(lost.event->more_text()))};
  return std::nullopt;
}

void IncidentStory::find_causes() {
  using enum events::Kind;
  for (auto replica : incident_.lost) {
    if (end_is_known(replica)) continue;
    std::optional<Cause> cause;
    for (const auto* daemon : daemons_of(replica))
      if (!cause) cause = what_cut_off(*daemon);
    for (const auto& one : recordings_.all)
      if (const auto place = place_of(one); !cause && place && place->first == replica)
        if (const auto lost = lost_last(daemon_lost, daemon_back, &one))
          cause = Cause{nullptr, lost.event->at,
                        fmt::format("{} lost its daemon at {}: {}", process_of(one), clock(lost.event->at),
                                    short_text(lost.event->text))};
    if (cause && std::ranges::find(causes_, cause->text, &Cause::text) == causes_.end()) causes_.push_back(*cause);
  }
  was_cut_off_ = culprit_ == nullptr && down_ == nullptr && !left_ && !causes_.empty();
  if (!was_cut_off_) return;
  culprit_ = causes_.front().daemon;
  began_ = causes_.front().began;
  sign_known_ = true;
}

// Where nobody is known who ended, stood still or was cut off.
std::string IncidentStory::what_is_unknown() const {
  if (incident_.lost.empty() && decision() != nullptr)
    return "A connection between two members broke; nobody ended, as far as the recordings go";
  const bool reaches = std::ranges::any_of(recordings_.all, [&](const Recording& one) {
    const auto place = place_of(one);
    return place && is_lost(place->first) && !one.events.empty() && one.events.front().at <= incident_.at &&
           last_event(one) > incident_.at;
  });
  const auto replicas = fmt::format("{}", fmt::join(incident_.lost, ", "));
  std::string text = fmt::format("Unknown: no recording of replica {} reaches up to there", replicas);
  if (reaches) text = fmt::format("Unknown: recordings of replica {} go on after it, and do not say why", replicas);
  if (down_ != nullptr)
    text += fmt::format(
        "; its daemon said: {}. That process has no recording here: none was copied, or it was removed, as is done "
        "with the oldest ones of processes that have ended",
        short_text(down_->text));
  return text;
}

}  // namespace rejoin::daemon
