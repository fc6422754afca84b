// What the coordinators' logs prove, and where there are several: what it cost to lose the one that led, or their etcd.
#pragma once

#include "examples/demo_story.h"

namespace rejoin::demo {

// For the report: `ledger` and `rolled_back_steps` by the log that is complete up to step `committed`; of several logs
// also `copies`, each with its audit, and `leads`: who led from which step on, in which term.
nlohmann::json audit_of(const std::map<std::string, std::string>& logs, std::uint64_t committed);

// Of one of the `deeds`: the step that it met, that is, the longer one of the two that follow on it, since it may fall
// between two steps. From then until the next deed or the end: the longest step, who was put out, who led next. Of a
// coordinator that was stopped: how many steps it committed that others had committed meanwhile.
nlohmann::json what_it_cost(const Deed& deed, const std::vector<Deed>& deeds, const std::vector<Event>& events);

// For people.
std::string cost_line(const nlohmann::json& failure);
std::string proof_lines(const nlohmann::json& report);  // of several coordinators; empty: there was one
// Whether each of several coordinators has all that was decided, with nothing lost or repeated, and none decided what
// it must not.
bool sound(const nlohmann::json& report);

}  // namespace rejoin::demo
