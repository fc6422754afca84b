// Who came back after an incident, and what it cost.
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/bytes.h"
#include "daemon/incident_story.h"
#include "daemon/incident_words.h"

namespace rejoin::daemon {

std::string IncidentStory::what_was_caught_up(std::uint32_t replica, std::int64_t from, std::int64_t to) const {
  std::uint64_t bytes = 0;
  std::int64_t longest = 0;
  std::size_t ranks = 0;
  std::string words;
  std::set<std::uint32_t> sources;
  for (const auto& one : recordings_.all) {
    const auto* done = &one.events;
    bool here = false;
    for (const auto& event : *done) {
      if (event.kind != events::Kind::caught_up || event.numbers.replica != replica || event.at < from ||
          event.at > to + kSecond)
        continue;
      here = true;
      ++ranks;
      bytes += std::min<std::uint64_t>(event.numbers.a, 1ull << 50);
      longest = std::max(longest, nanoseconds(event.numbers.b));
      words += fmt::format("{}rank {}: {}", words.empty() ? "" : "; ", event.numbers.number, short_text(event.text));
    }
    for (const auto& event : one.events)
      if (here && event.kind == events::Kind::source_up && event.at >= from && event.at <= to)
        sources.insert(event.numbers.replica);
  }
  if (ranks == 0) return "what it caught up from whom is unknown: its daemon's recording is not here";
  std::string text = fmt::format("it caught up {} in {}", human_bytes(bytes), lasting(longest));
  if (longest > 0)
    text += fmt::format(" ({}/s)", human_bytes(static_cast<std::uint64_t>(std::min(
                                       static_cast<double>(bytes) * 1e9 / static_cast<double>(longest), 1e18))));
  if (!sources.empty())
    text += fmt::format(" from replica{} {}", sources.size() == 1 ? "" : "s", fmt::join(sources, ", "));
  return text + " (" + words + ")";
}

// Where its daemon says before `until` that the process that came with this rank_up is gone: that.
const RecordedEvent* IncidentStory::gone_again(const Recording& in, const RecordedEvent& up, std::int64_t until) const {
  for (const auto& event : in.events)
    if ((event.kind == events::Kind::rank_down || event.kind == events::Kind::rank_left) && event.at >= up.at &&
        event.at < until && event.numbers.replica == up.numbers.replica && event.numbers.number == up.numbers.number &&
        event.numbers.a == up.numbers.a)
      return &event;
  return nullptr;
}

std::string IncidentStory::who_registered(const Found& up, std::int64_t until) const {
  std::string text = fmt::format("A process registered for it {} (process {})", after(up.event->at, incident_.at),
                                 up.event->numbers.a);
  if (const auto* gone = gone_again(*up.in, *up.event, until))
    text += fmt::format(", and was gone {}: {}", after(gone->at, up.event->at), short_text(gone->text));
  return text + ".";
}

std::vector<std::string> IncidentStory::who_came_back(std::uint32_t replica) const {
  const EpochDecision *admitted = nullptr, *contributes = nullptr;
  for (std::size_t i = *incident_.decision + 1; i < incidents_.decisions.size() && contributes == nullptr; ++i) {
    const auto& one = incidents_.decisions[i];
    const auto its = one.members.find(replica);
    if (its == one.members.end()) {
      if (admitted != nullptr) break;  // lost again before it had caught up: another incident
      continue;
    }
    if (admitted == nullptr) admitted = &one;
    if (!its->second) contributes = &one;
  }
  const std::int64_t end = admitted == nullptr ? until_ + 1 : admitted->at;
  const auto registers = [&](bool stays) {
    return first(incident_.at, end, [&](const Recording& in, const RecordedEvent& event) {
      return event.kind == events::Kind::rank_up && event.numbers.replica == replica &&
             (!stays || !gone_again(in, event, end));
    });
  };
  auto up = registers(true);
  if (!up) up = registers(false);
  if (admitted == nullptr)
    return {fmt::format("Replica {}: {} It is not back when the recordings end, {}.", replica,
                        up ? who_registered(up, end) : "Nobody registered for it again.", after(until_, incident_.at))};
  std::string text = fmt::format("Replica {}: ", replica);
  if (contributes == admitted) {
    text += fmt::format("It was taken back as it was in epoch {}, {}; it had nothing to catch up.", admitted->epoch,
                        after(admitted->at, incident_.at));
  } else {
    if (up) text += who_registered(up, end) + " ";
    text += fmt::format("Admitted in epoch {}, {};", admitted->epoch, after(admitted->at, incident_.at));
    text += " " + what_was_caught_up(replica, admitted->at, contributes == nullptr ? until_ : contributes->at) + ".";
  }
  if (contributes == nullptr)
    return {text + " It does not contribute yet when it was lost again, or the recordings end."};
  const auto* decided = decision();
  return {text, fmt::format("Replica {}: It contributed again from step {} on (epoch {}), {} than it was taken out: it "
                            "was missing in {} steps.",
                            replica, contributes->step, contributes->epoch, after(contributes->at, incident_.at),
                            contributes->step - std::min(decided->step, contributes->step))};
}

// A daemon or a coordinator.
std::string IncidentStory::who_came_again() const {
  if (culprit_ == nullptr || place_of(*culprit_)) return "";
  if (was_cut_off_ && last_event(*culprit_) > incident_.at) {
    const auto* up = find_event(*culprit_, events::Kind::coordinator_up, incident_.at);
    return up == nullptr
               ? ""
               : fmt::format("{} had the coordinator again {}.", capital(role_of(*culprit_)), after(up->at, began_));
  }
  const Recording* next = nullptr;
  for (const auto& one : recordings_.all)
    if (&one != culprit_ && one.who == culprit_->who && !one.events.empty() && one.events.front().at >= began_ &&
        (next == nullptr || one.events.front().at < next->events.front().at))
      next = &one;
  if (next == nullptr) return fmt::format("No recording of another {} is here.", role_of(*culprit_));
  std::string text = fmt::format("Process {} took its place {}", next->pid, after(next->events.front().at, began_));
  if (const auto* recovered = find_event(*next, events::Kind::recovered, began_))
    text +=
        fmt::format(", and went on from the log: epoch {}, step {}", recovered->numbers.epoch, recovered->numbers.step);
  std::size_t back = 0;
  std::int64_t last = began_;
  const events::Kind kind = decides(*culprit_) ? events::Kind::coordinator_up : events::Kind::daemon_back;
  for (const auto& one : recordings_.all)
    if (const auto* event = one.events.empty() || one.events.front().at > began_
                                ? nullptr
                                : find_event(one, kind, began_ + 1, began_ + 60 * kSecond))
      ++back, last = std::max(last, event->at);
  text += fmt::format(". {} {} connected with it again", back, decides(*culprit_) ? "daemons" : "trainers");
  if (back > 0) text += fmt::format(", the last one {}", after(last, began_));
  return text + ".";
}

std::string IncidentStory::what_it_cost() const {
  const auto* next = commit_after(incident_.at);
  const auto median = median_step(began_), took = next == nullptr ? std::nullopt : time_of(*next);
  std::string text;
  if (took && median) text = fmt::format("about {} for everybody", lasting(std::max<std::int64_t>(*took - *median, 0)));
  else text = "how much time everybody lost is unknown";
  if (incident_.lost.empty() && !incident_.shows_no_epoch)
    return capital(text) + ", and so is whether anybody was taken out.";
  if (incident_.lost.empty()) return capital(text) + "; no step was lost, and nobody was taken out.";
  for (auto replica : incident_.lost) {
    std::uint64_t until = commits_.empty() ? 0 : commits_.back().step;
    for (std::size_t i = *incident_.decision + 1; i < incidents_.decisions.size(); ++i) {
      const auto its = incidents_.decisions[i].members.find(replica);
      if (its == incidents_.decisions[i].members.end() || its->second) continue;
      until = incidents_.decisions[i].step - 1;
      break;
    }
    const std::uint64_t from = decision()->step;
    text += fmt::format("; the gradients of replica {} in {} steps", replica, until + 1 - std::min(from, until + 1));
  }
  const bool somebody_left =
      std::ranges::any_of(decision()->members, [](const auto& member) { return !member.second; });
  if (somebody_left) return capital(text) + ". No committed step was lost.";
  return capital(text) + ". No contributor was left: committed steps are lost that are in no checkpoint.";
}

}  // namespace rejoin::daemon
