#include "daemon/incidents.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <set>

#include "base/bytes.h"
#include "base/number.h"
#include "daemon/incident_words.h"

namespace rejoin::daemon {

namespace {

constexpr std::int64_t kTogether = kSecond;  // between the last events of processes that a machine took along

// "0,1c,2": c of one that catches up.
std::map<std::uint32_t, bool> members_of(const std::string& text) {
  std::map<std::uint32_t, bool> members;
  for (auto one : split(text, ',')) {
    const bool catching_up = one.ends_with('c');
    if (catching_up) one.pop_back();
    std::uint32_t replica = 0;
    if (parse_number(one, replica)) members[replica] = catching_up;
  }
  return members;
}

std::vector<EpochDecision> decisions_of(const Recordings& recordings) {
  std::map<std::uint64_t, EpochDecision> found;
  for (const auto& one : recordings.all)
    for (const auto& event : one.events) {
      const bool decided = event.kind == events::Kind::epoch;
      if ((!decided && event.kind != events::Kind::enter_epoch) || event.cut) continue;
      EpochDecision decision{.at = event.at,
                             .epoch = event.numbers.epoch,
                             .step = event.numbers.step,
                             .members = members_of(event.first_text()),
                             .reason = event.more_text(),
                             .decided = decided};
      auto& known = found.try_emplace(decision.epoch, decision).first->second;
      const bool better = decided != known.decided ? decided : decision.at < known.at;
      if (better) known = std::move(decision);
    }
  std::vector<EpochDecision> all;
  for (auto& [epoch, decision] : found) all.push_back(std::move(decision));
  return all;
}

std::vector<std::uint32_t> lost_between(const EpochDecision& before, const EpochDecision& after) {
  std::vector<std::uint32_t> lost;
  for (const auto& [replica, catching_up] : before.members)
    if (!after.members.contains(replica)) lost.push_back(replica);
  return lost;
}

// Whether a process of this replica has come to another daemon, or has come back to it, between these times.
bool registered_between(std::uint32_t replica, std::int64_t since, std::int64_t until, const Recordings& recordings) {
  return std::ranges::any_of(recordings.all, [&](const Recording& one) {
    return std::ranges::any_of(one.events, [&](const RecordedEvent& event) {
      return event.kind == events::Kind::rank_up && event.numbers.replica == replica && event.at > since &&
             event.at < until;
    });
  });
}

// The first epoch after the end of this process that follows from it. Whom a daemon has served, and who had a daemon
// again by then, was lost for another reason.
Incident* cause_of(const Recording& ended, const Recordings& recordings, std::vector<Incident>& incidents) {
  const std::int64_t at = last_event(ended);
  const auto place = place_of(ended);
  if (place && !took_part(ended)) return nullptr;
  std::set<std::uint32_t> serves;
  if (place) serves.insert(place->first);
  for (const auto& event : ended.events)
    if (event.kind == events::Kind::rank_up) serves.insert(event.numbers.replica);
  for (auto& incident : incidents) {
    if (!incident.decision || incident.at < at - kSecond / 10 || incident.at - at > kMostToDecide) continue;
    if (std::ranges::any_of(incident.lost, [&](auto replica) {
          return serves.contains(replica) && (place || !registered_between(replica, at, incident.at, recordings));
        }))
      return &incident;
  }
  return nullptr;
}

// From when on the job was finished, or was not: one that is given more steps goes on.
std::map<std::int64_t, bool> when_finished(const Recordings& recordings) {
  std::map<std::int64_t, bool> finished;
  for (const auto& one : recordings.all)
    for (const auto& event : one.events) {
      if (event.kind == events::Kind::finished) finished[event.at] = true;
      if (event.kind == events::Kind::commit || event.kind == events::Kind::epoch)
        finished.try_emplace(event.at, false);
    }
  return finished;
}

// Whether somebody was there afterwards: otherwise this is the end of all recordings.
bool outlived(const Recording& one, const Recordings& recordings) {
  return std::ranges::any_of(
      recordings.all, [&](const Recording& other) { return &other != &one && last_event(other) > last_event(one); });
}

// What tells an end from a copy. In a copied recording of a process that lives there is nothing after it was copied,
// nor in the others of its machine.
class Ends {
 public:
  explicit Ends(const Recordings& recordings) {
    for (const auto& one : recordings.all) {
      auto& last = machines_[one.clock];
      last = std::max(last, last_event(one));
      if (one.lives) in_place_.insert(one.clock);
      const bool coordinator = decides(one);
      for (const auto& event : one.events) take(one, event, coordinator);
    }
  }
  // Whether it is known of this process, which has not said so: its daemon, its machine's others, or its coordinator
  // has gone on without it, or the job is over.
  bool known_of(const Recording& one) const {
    const std::int64_t last = last_event(one);
    if (in_place_.contains(one.clock)) return true;  // nobody has its file open any more
    const auto daemon = served_.find({one.clock, one.pid});
    if (place_of(one) && daemon != served_.end() && daemon->second > last) return false;
    const auto lost = lost_.find(one.who);
    return machines_.at(one.clock) > last + kTogether || over_ > last ||
           (lost != lost_.end() && lost->second >= last) || (decides(one) && led_ > last);
  }

 private:
  void take(const Recording& in, const RecordedEvent& event, bool coordinator) {
    using events::Kind;
    const std::pair process(in.clock, event.numbers.a);
    if (event.kind == Kind::rank_up) served_[process] = last_event(in);
    if (event.kind == Kind::rank_down || event.kind == Kind::rank_left) served_.erase(process);
    if (event.kind == Kind::node_lost) lost_[event.first_text()] = event.at;
    if (event.kind == Kind::leader) led_ = std::max(led_, event.at);
    if (event.kind == Kind::ended && coordinator) over_ = std::max(over_, event.at);
  }
  std::map<std::uint64_t, std::int64_t> machines_;                          // the last event on each
  std::set<std::uint64_t> in_place_;                                        // machines of which these are no copies
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::int64_t> served_;  // trainers: their daemon's last event
  std::map<std::string, std::int64_t> lost_;                                // nodes that a coordinator has lost
  std::int64_t over_ = std::numeric_limits<std::int64_t>::min(), led_ = over_;
};

// Two processes of one machine of which nobody is heard afterwards.
bool lost_together(const Recording& one, const Recording& other, const Recordings& recordings) {
  const std::int64_t last = std::max(last_event(one), last_event(other));
  return one.clock == other.clock && last_event(other) - last_event(one) < kTogether &&
         std::ranges::none_of(recordings.all, [&](const Recording& each) {
           return each.clock == one.clock && last_event(each) > last + kTogether;
         });
}

// Whether a coordinator, or a trainer of a replica that has not ended then, was there before and has gone on: until a
// step was committed, or for so long that an epoch would have begun; of who begins it a while is enough.
bool shows_epochs_after(const Incident& incident, const Recordings& recordings) {
  std::set<std::uint32_t> ended;
  for (const auto* one : incident.ended)
    if (const auto place = place_of(*one)) ended.insert(place->first);
  return std::ranges::any_of(recordings.all, [&](const Recording& one) {
    const auto place = place_of(one);
    const bool would_know = decides(one) || (place && took_part(one) && !ended.contains(place->first));
    if (!would_know || std::ranges::find(incident.ended, &one) != incident.ended.end() || one.events.empty())
      return false;
    if (one.events.front().at > incident.at ||
        one.begins[static_cast<std::size_t>(events::Ring::incidents)] > incident.at)
      return false;
    return last_event(one) - incident.at > (decides(one) ? kTogether : kMostToDecide) ||
           std::ranges::any_of(one.events, [&](const RecordedEvent& event) {
             return event.at > incident.at &&
                    (event.kind == events::Kind::commit || event.kind == events::Kind::committed);
           });
  });
}

}  // namespace

bool said_that_it_ends(const Recording& recording) {
  bool said = false;
  for (const auto& event : recording.events) {
    if (event.kind == events::Kind::ended || event.kind == events::Kind::left) said = true;
    if (event.kind == events::Kind::named || event.kind == events::Kind::registered) said = false;  // another session
  }
  return said;
}

bool took_part(const Recording& recording) {
  const bool overwritten = std::ranges::any_of(recording.begins, [](auto begins) { return begins != 0; });
  return overwritten || std::ranges::any_of(recording.events, [](const RecordedEvent& event) {
           return event.kind == events::Kind::registered || event.numbers.epoch != 0;
         });
}

bool decides(const Recording& recording) {
  return recording.who.starts_with("coordinator") ||
         std::ranges::any_of(recording.events, [](const RecordedEvent& event) {
           return event.kind == events::Kind::epoch || event.kind == events::Kind::recovered ||
                  event.kind == events::Kind::leader;
         });
}

std::optional<std::pair<std::uint32_t, std::uint32_t>> place_of(const Recording& recording) {
  unsigned replica = 0, rank = 0;
  char more = 0;
  if (std::sscanf(recording.who.c_str(), "r%9u.%9u%c", &replica, &rank, &more) != 2) return std::nullopt;
  return std::pair(std::uint32_t{replica}, std::uint32_t{rank});
}

std::string Incident::title() const {
  std::string replicas;
  for (auto replica : lost) replicas += fmt::format("{}{}", replicas.empty() ? "" : ", ", replica);
  std::string names;
  for (const auto* one : ended)
    if (lost.empty()) names += fmt::format("{}{}", names.empty() ? "" : ", ", one->who);
  if (!decision)
    return fmt::format("the end of {}, {}", names,
                       shows_no_epoch ? "without a new epoch" : "and whether an epoch began for it is not recorded");
  if (lost.empty()) return fmt::format("epoch {}, of the same members", epoch);
  return fmt::format("epoch {}, without replica {}", epoch, replicas);
}

Incidents find_incidents(const Recordings& recordings) {
  Incidents found{.decisions = decisions_of(recordings), .all = {}};
  for (std::size_t i = 1; i < found.decisions.size(); ++i) {
    const auto& decision = found.decisions[i];
    auto lost = lost_between(found.decisions[i - 1], decision);
    const bool mends = decision.reason.find("connect again") != std::string::npos;
    if (lost.empty() && !mends) continue;
    found.all.push_back(
        {.at = decision.at, .decision = i, .lost = std::move(lost), .ended = {}, .epoch = decision.epoch});
  }
  std::vector<const Recording*> ended;
  const auto finished = when_finished(recordings);
  const auto was_finished = [&](std::int64_t at) {
    const auto later = finished.upper_bound(at);
    return later != finished.begin() && std::prev(later)->second;
  };
  for (const auto& one : recordings.all)
    if (!one.lives && one.missing == 0 && !said_that_it_ends(one) && outlived(one, recordings) &&
        !was_finished(last_event(one)))
      ended.push_back(&one);
  std::ranges::sort(ended, {}, [](const Recording* one) { return last_event(*one); });
  std::vector<Incident> others;
  const Ends ends(recordings);
  for (const auto* one : ended) {
    if (Incident* of = cause_of(*one, recordings, found.all)) of->ended.push_back(one);
    else if (!ends.known_of(*one)) ++found.unknown;
    else if (!others.empty() && lost_together(*others.back().ended.back(), *one, recordings))
      others.back().ended.push_back(one);
    else others.push_back({.at = last_event(*one), .decision = {}, .lost = {}, .ended = {one}});
  }
  for (auto& one : others) one.shows_no_epoch = shows_epochs_after(one, recordings);
  found.all.insert(found.all.end(), others.begin(), others.end());
  std::ranges::stable_sort(found.all, {}, &Incident::at);
  return found;
}

}  // namespace rejoin::daemon
