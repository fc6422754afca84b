// The sentences of one incident, for explain.h.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/incidents.h"

namespace rejoin::daemon {

class IncidentStory {
 public:
  // All outlive this.
  IncidentStory(const Recordings& recordings, const Incidents& incidents, const Incident& incident);
  void tell(std::vector<std::string>& lines) const;

 private:
  struct Step {
    std::int64_t at = 0;
    std::uint64_t step = 0;
  };
  struct Found {  // an event, and in whose recording
    const Recording* in = nullptr;
    const RecordedEvent* event = nullptr;
    explicit operator bool() const { return event != nullptr; }
  };
  // The first in [from, to) that fits, of any process.
  template <typename Fits>
  Found first(std::int64_t from, std::int64_t to, Fits fits) const;

  struct Cause {  // why nobody heard of a replica whose processes may well have lived
    const Recording* daemon = nullptr;
    std::int64_t began = 0;
    std::string text;
  };

  bool is_lost(std::uint32_t replica) const;
  const Recording* trainer_of(const Found& down) const;
  bool of_a_stranger(const Found& down) const;
  Found first_gone(events::Kind kind) const;
  bool end_is_known(std::uint32_t replica) const;
  std::set<const Recording*> daemons_of(std::uint32_t replica) const;
  Found lost_last(events::Kind lost, events::Kind up, const Recording* only, const std::string& name = "") const;
  std::optional<Cause> what_cut_off(const Recording& daemon) const;
  void find_causes();
  const EpochDecision* decision() const;
  std::string clock(std::int64_t at) const;
  std::string after(std::int64_t at, std::int64_t since) const;
  std::string what_happened() const;
  std::string what_is_unknown() const;
  std::string what_became_of_culprit() const;
  std::string what_ended(const Recording& one) const;
  std::string what_stood_still(const Recording& one) const;
  std::string who_noticed() const;
  std::string what_was_decided() const;
  std::string what_survivors_did() const;
  std::string which_step() const;
  std::vector<std::string> who_came_back(std::uint32_t replica) const;
  std::string what_was_caught_up(std::uint32_t replica, std::int64_t from, std::int64_t to) const;
  const RecordedEvent* gone_again(const Recording& in, const RecordedEvent& up, std::int64_t until) const;
  std::string who_registered(const Found& up, std::int64_t until) const;
  std::string who_came_again() const;
  std::string what_it_cost() const;
  void find_commits();
  const Step* commit_after(std::int64_t at) const;
  std::optional<std::int64_t> time_of(const Step& commit) const;  // one of commits_
  std::optional<std::int64_t> median_step(std::int64_t before) const;

  const Recordings& recordings_;
  const Incidents& incidents_;
  const Incident& incident_;
  std::vector<Step> commits_;  // in the order of time; a step that was trained again is there for each time
  std::int64_t since_ = 0;     // nothing before that has to do with it
  std::int64_t began_ = 0;     // the last sign of life of who ended or stood still; where none is known the decision
  bool sign_known_ = false;
  const Recording* culprit_ = nullptr;   // whose sign that was
  const RecordedEvent* down_ = nullptr;  // the daemon's word for it
  Found left_;                           // … where it has left in order, and nobody ended otherwise
  std::vector<Cause> causes_;            // of replicas of which no end is known
  bool was_cut_off_ = false;             // … and of nobody else: the first of these is what happened
  std::int64_t until_ = 0;               // no event is later
};

template <typename Fits>
IncidentStory::Found IncidentStory::first(std::int64_t from, std::int64_t to, Fits fits) const {
  Found found;
  for (const auto& one : recordings_.all)
    for (const auto& event : one.events)
      if (event.at >= from && event.at < to && (!found || event.at < found.event->at) && fits(one, event))
        found = {&one, &event};
  return found;
}

}  // namespace rejoin::daemon
