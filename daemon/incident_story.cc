#include "daemon/incident_story.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/lower_median.h"
#include "daemon/incident_words.h"

namespace rejoin::daemon {

IncidentStory::IncidentStory(const Recordings& recordings, const Incidents& incidents, const Incident& incident)
    : recordings_(recordings), incidents_(incidents), incident_(incident), began_(incident.at), until_(incident.at) {
  for (const auto& one : recordings.all) until_ = std::max(until_, last_event(one));
  find_commits();

  since_ = std::max(incident.at - kMostToDecide, incident.decision && *incident.decision > 0
                                                     ? incidents.decisions[*incident.decision - 1].at
                                                     : std::numeric_limits<std::int64_t>::min());
  const auto down = first_gone(events::Kind::rank_down);
  down_ = down.event;
  if (down_ == nullptr && incident.ended.empty()) left_ = first_gone(events::Kind::rank_left);
  if (left_) began_ = left_.event->at;
  for (const auto* one : incident.ended)
    if (!place_of(*one)) culprit_ = culprit_ == nullptr ? one : culprit_;
  if (culprit_ == nullptr && down_ != nullptr) culprit_ = trainer_of(down);
  for (const auto* one : incident.ended) {
    const auto place = place_of(*one);
    if (culprit_ == nullptr && down_ == nullptr && place && is_lost(place->first) && one->opened_ns != 0)
      culprit_ = one;
  }
  if (culprit_ == nullptr && !incident.ended.empty()) culprit_ = incident.ended.front();
  find_causes();
  if (culprit_ == nullptr || sign_known_) return;
  const auto* sign = last_before(*culprit_, down_ != nullptr ? std::min(down_->at, incident.at) : incident.at);
  if (sign == nullptr) return;
  began_ = sign->at;
  sign_known_ = true;
}

// The first word of each. Where an epoch begins with a step that was committed before, the job was rolled back, and
// what is told from there on is of steps that are trained again.
void IncidentStory::find_commits() {
  std::vector<Step> words;
  for (const auto& one : recordings_.all)
    for (const auto& event : one.events)
      if (event.kind == events::Kind::commit || event.kind == events::Kind::committed)
        words.push_back({event.at, event.numbers.step});
  std::ranges::stable_sort(words, {}, &Step::at);
  std::map<std::uint64_t, std::int64_t> known;
  auto epoch = incidents_.decisions.begin();
  for (const auto& word : words) {
    for (; epoch != incidents_.decisions.end() && epoch->at <= word.at; ++epoch)
      if (const auto before = known.lower_bound(epoch->step);
          before != known.end() && before->second < epoch->at - 2 * recordings_.clock_error)
        known.clear();
    if (known.try_emplace(word.step, word.at).second) commits_.push_back(word);
  }
}

const EpochDecision* IncidentStory::decision() const {
  return incident_.decision ? &incidents_.decisions[*incident_.decision] : nullptr;
}

std::string IncidentStory::after(std::int64_t at, std::int64_t since) const {
  const std::int64_t passed = at - since;
  if (passed < 0 && -passed <= 2 * recordings_.clock_error) return "at once, as far as the clocks can tell";
  return passed < 0 ? lasting(-passed) + " before" : lasting(passed) + " later";
}

std::string IncidentStory::clock(std::int64_t at) const { return time_of_day(recordings_.wall(at)); }

void IncidentStory::tell(std::vector<std::string>& lines) const {
  const auto add = [&](const char* about, const std::string& text) {
    if (!text.empty()) lines.push_back(fmt::format("{}: {}", about, text));
  };
  add("What happened", what_happened());
  add("Noticed", who_noticed());
  add("Decided", what_was_decided());
  add("The others", what_survivors_did());
  add("The step", which_step());
  for (auto replica : incident_.lost)
    for (const auto& line : who_came_back(replica)) lines.push_back(line);
  add("Back", who_came_again());
  add("Cost", what_it_cost());
}

// ---- what happened

std::string IncidentStory::what_ended(const Recording& one) const {
  std::string last;
  if (!one.events.empty()) {
    const auto& event = one.events.back();
    const auto& its = events::traits(event.kind);
    last = fmt::format(" with '{}'{}", its.name, its.step ? fmt::format(" of step {}", event.numbers.step) : "");
  }
  return fmt::format(
      "{} ended without a word at {}: its recording stops there{}. Whether it was killed or crashed, or its machine "
      "was lost, is not recorded",
      process_of(one), clock(last_event(one)), last);
}

std::string IncidentStory::what_stood_still(const Recording& one) const {
  const std::string who = process_of(one);
  const auto* paused = find_event(one, events::Kind::paused, began_ + 1);
  const std::int64_t pause = paused == nullptr ? 0 : nanoseconds(paused->numbers.a);
  if (paused != nullptr && paused->at - pause <= began_ + kSecond)
    return fmt::format("{} stood still for {}: its last sign of life was at {}, and then it went on", who,
                       lasting(pause), clock(began_));
  if (last_event(one) <= began_ && one.lives)
    return fmt::format("{} stands still: its last sign of life was at {}, and its process is still there", who,
                       clock(began_));
  if (last_event(one) <= began_)
    return fmt::format(
        "{} gave its last sign of life at {}: it stood still or was cut off, and its recording goes no "
        "further",
        who, clock(began_));
  return fmt::format("{} gave a sign of life at {}, and others afterwards", who, clock(began_));
}

std::string IncidentStory::what_became_of_culprit() const {
  const auto* failed = find_event(*culprit_, events::Kind::failed, began_ - kSecond, incident_.at + kSecond);
  const bool silent = down_ != nullptr && down_->text.find("no sign of life") != std::string::npos;
  if (failed != nullptr && down_ != nullptr && down_->at >= failed->at)
    return fmt::format("{} failed at {}: {}", process_of(*culprit_), clock(failed->at), short_text(failed->text));
  if (silent) return what_stood_still(*culprit_);
  if (!culprit_->lives && !said_that_it_ends(*culprit_)) return what_ended(*culprit_);
  if (down_ != nullptr)
    return fmt::format("{} was gone at {}: {}", process_of(*culprit_), clock(down_->at), short_text(down_->text));
  return what_stood_still(*culprit_);
}

std::string IncidentStory::what_happened() const {
  std::string text;
  if (left_)
    text = fmt::format("Rank {} of replica {} (process {}) left in order at {}: {}", left_.event->numbers.number,
                       left_.event->numbers.replica, left_.event->numbers.a, clock(left_.event->at),
                       short_text(left_.event->text));
  else if (was_cut_off_) text = causes_.front().text;
  else text = culprit_ == nullptr ? what_is_unknown() : what_became_of_culprit();
  for (const auto* one : incident_.ended)
    if (one != culprit_ && (!place_of(*one) || last_event(*one) <= incident_.at))
      text += fmt::format(". {} ended, too, at {}", capital(process_of(*one)), clock(last_event(*one)));
  for (std::size_t i = was_cut_off_ ? 1 : 0; i < causes_.size(); ++i) text += ". " + capital(causes_[i].text);
  return capital(text) + ".";
}

// ---- who noticed

std::string IncidentStory::who_noticed() const {
  const std::int64_t from = began_ - 2 * recordings_.clock_error,
                     to = incident_.at + (decision() != nullptr ? kSecond / 10 : 10 * kSecond);
  const bool of_coordinator = culprit_ != nullptr && decides(*culprit_),
             of_daemon = culprit_ != nullptr && !place_of(*culprit_);
  const auto concerns = [&](std::uint32_t replica) {
    return is_lost(replica) || (incident_.lost.empty() && std::ranges::any_of(incident_.ended, [&](const auto* one) {
                                  const auto place = place_of(*one);
                                  return place && place->first == replica;
                                }));
  };
  std::vector<Found> found;
  const auto look = [&](auto fits) {
    const auto one = first(from, to, [&](const Recording& in, const RecordedEvent& event) {
      const bool gone = event.kind == events::Kind::rank_down || event.kind == events::Kind::rank_left;
      return &in != culprit_ && fits(event) && !(gone && of_a_stranger({&in, &event}));
    });
    if (one) found.push_back(one);
  };
  look([&](const RecordedEvent& e) {
    return (e.kind == events::Kind::rank_down || e.kind == events::Kind::rank_left) && concerns(e.numbers.replica);
  });
  look([&](const RecordedEvent& e) { return e.kind == events::Kind::peer_lost && concerns(e.numbers.replica); });
  look([&](const RecordedEvent& e) {
    return e.kind == events::Kind::accused && e.numbers.b == 0 && concerns(e.numbers.replica);
  });
  if (of_daemon) {
    look([&](const RecordedEvent& e) { return e.kind == events::Kind::node_lost && e.first_text() == culprit_->who; });
    if (!of_coordinator) look([&](const RecordedEvent& e) { return e.kind == events::Kind::daemon_lost; });
  }
  if (of_coordinator) look([&](const RecordedEvent& e) { return e.kind == events::Kind::coordinator_lost; });
  if (decision() != nullptr && incident_.lost.empty())
    look([&](const RecordedEvent& e) { return e.kind == events::Kind::peer_lost; });
  std::ranges::sort(found, {}, [](const Found& one) { return one.event->at; });
  if (found.empty()) return "Nobody's recording says who noticed, or when: unknown.";
  std::string text;
  for (const auto& one : found) {
    const auto& event = *one.event;
    const bool about_peer = event.kind == events::Kind::peer_lost || event.kind == events::Kind::accused;
    const std::string what =
        event.kind == events::Kind::daemon_lost ? fmt::format("lost its daemon: {}", short_text(event.text))
        : event.kind == events::Kind::node_lost
            ? fmt::format("lost node {}: {}", event.first_text(), short_text(event.more_text()))
        : event.kind == events::Kind::coordinator_lost
            ? fmt::format("lost the coordinator: {}", short_text(event.more_text()))
        : event.kind == events::Kind::accused
            ? fmt::format("waited for replica {}: {}", event.numbers.replica, short_text(event.text))
        : about_peer
            ? fmt::format("lost its connection with replica {}: {}", event.numbers.replica, short_text(event.text))
            : fmt::format("said of rank {}: {}", event.numbers.number, short_text(event.text));
    text += fmt::format("{}{} {}, {}", text.empty() ? "" : "; ", role_of(*one.in), what,
                        sign_known_ ? after(event.at, began_) : "at " + clock(event.at));
  }
  return capital(text) + ".";
}

// ---- what was decided, and done

std::string IncidentStory::what_was_decided() const {
  const auto* decided = decision();
  if (decided == nullptr && !incident_.shows_no_epoch)
    return "Unknown: no recording of a coordinator, or of another replica's trainer, that goes on past it is here.";
  if (decided == nullptr) return "No epoch began for it: nobody was taken out.";
  std::string members;
  for (const auto& [replica, catching_up] : decided->members)
    members += fmt::format("{}{}{}", members.empty() ? "" : ", ", replica, catching_up ? " (catching up)" : "");
  if (!decided->decided)
    return fmt::format(
        "Unknown: there is no recording of the coordinator that decided. Epoch {} with replicas {} was "
        "first entered at {}.",
        decided->epoch, members, clock(decided->at));
  std::string text = fmt::format("The coordinator began epoch {} with replicas {} at {}", decided->epoch,
                                 members.empty() ? "none" : members, clock(decided->at));
  if (sign_known_) text += fmt::format(", {} than the last sign of life", after(decided->at, began_));
  text += fmt::format(", for: {}.", short_text(decided->reason));
  const RecordedEvent* append = nullptr;
  for (const auto& one : recordings_.all)
    for (const auto& event : one.events)
      if (event.kind == events::Kind::appended && event.at <= decided->at &&
          decided->at - event.at < 10 * kMillisecond && (append == nullptr || event.at > append->at))
        append = &event;
  if (append != nullptr)
    text += fmt::format(" The decision was on disk in {}.", lasting(nanoseconds(append->numbers.a)));
  return text;
}

std::string IncidentStory::what_survivors_did() const {
  const auto* decided = decision();
  if (decided == nullptr) return "";
  std::size_t entered = 0, clean = 0;
  std::uint64_t buckets = 0, bytes = 0, ready = 0;
  std::int64_t last = decided->at;
  const Recording* slowest = nullptr;
  for (const auto& one : recordings_.all)
    for (const auto& event : one.events) {
      if (event.numbers.epoch != decided->epoch) continue;
      if (event.kind == events::Kind::enter_epoch) {
        ++entered;
        buckets = std::max(buckets, event.numbers.a);
        ready = std::max<std::uint64_t>(ready, event.numbers.number);
        bytes = std::max(bytes, event.numbers.b);
      }
      if (event.kind != events::Kind::entered) continue;
      ++clean;
      if (event.at < last && slowest != nullptr) continue;
      last = event.at;
      slowest = &one;
    }
  if (entered == 0) return "No recording of a trainer that entered this epoch is here: what they did is unknown.";
  std::string text = fmt::format("{} trainers entered the epoch", entered);
  if (slowest != nullptr)
    text += fmt::format(", the last one ({}) after {} with nothing of the old epoch on its way any more", slowest->who,
                        lasting(last - decided->at));
  if (clean < entered) text += fmt::format("; {} of them did not get so far", entered - clean);
  if (buckets > 0)
    text += fmt::format(
        ". Up to {} buckets ({}) of step {} were reduced again from the same gradients; {} of them had "
        "been reduced already",
        buckets, human_bytes(bytes), decided->step, ready);
  else text += ". No all-reduce was under way, so none was repeated";
  return text + ".";
}

const IncidentStory::Step* IncidentStory::commit_after(std::int64_t at) const {
  const auto found = std::ranges::upper_bound(commits_, at, {}, &Step::at);
  return found == commits_.end() ? nullptr : &*found;
}

// Since that of the step before it. Nothing where that is not known, or the job was rolled back in between.
std::optional<std::int64_t> IncidentStory::time_of(const Step& commit) const {
  const Step* before = &commit == commits_.data() ? nullptr : &commit - 1;
  if (before == nullptr || before->step + 1 != commit.step) return std::nullopt;
  return commit.at - before->at;
}

// Of the last steps before.
std::optional<std::int64_t> IncidentStory::median_step(std::int64_t before) const {
  std::vector<std::int64_t> times;
  for (std::size_t i = 1; i < commits_.size() && commits_[i].at < before; ++i)
    if (const auto took = time_of(commits_[i])) times.push_back(*took);
  if (times.size() > 16) times.erase(times.begin(), times.end() - 16);
  if (times.size() < 3) return std::nullopt;
  return lower_median(std::move(times));
}

std::string IncidentStory::which_step() const {
  const auto* next = commit_after(incident_.at);
  if (next == nullptr) return "No step is committed after it, as far as the recordings go.";
  if (next == commits_.data())
    return fmt::format(
        "The steps around it are not recorded any more: the first one that is is step {}, committed {} UTC.",
        next->step, clock(next->at));
  const auto took = time_of(*next);
  if (const auto& before = *(next - 1); !took && before.step < next->step)
    return fmt::format(
        "Unknown: of the steps after {}, the last one that is recorded before it, the next recorded one is step "
        "{}, committed {} UTC.",
        before.step, next->step, clock(next->at));
  if (!took)
    return fmt::format(
        "The job was rolled back after it: the next step that was committed is step {}, once more, at {} UTC.",
        next->step, clock(next->at));
  std::string text = fmt::format("Step {} was committed {} after the one before it", next->step, lasting(*took));
  if (const auto median = median_step(began_))
    text += fmt::format(" (median of the steps before: {}), so about {} were lost", lasting(*median),
                        lasting(std::max<std::int64_t>(*took - *median, 0)));
  else text += "; how long a step takes otherwise is not recorded";
  return text + ".";
}

}  // namespace rejoin::daemon
