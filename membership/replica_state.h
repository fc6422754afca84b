// What the coordinator keeps of each replica and rank that has registered.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "control.pb.h"
#include "membership/coordinator_actions.h"
#include "membership/coordinator_state.h"
#include "membership/rank_set.h"
#include "membership/statuses.h"

namespace rejoin::membership {

// What one or more ranks have declared: a hash of their plan, and their settings, as in RankUp.
struct Declaration {
  std::uint64_t plan_hash = 0;
  std::string settings;
  std::optional<proto::Declaration> content;  // what is behind the hash, once one of the ranks has told it
  TimePoint asked_at{};
};

struct RankState {
  NodeId node;
  std::uint64_t instance = 0, version = 0, digest = 0;  // of its state
  std::uint64_t trained = 0;                            // names the samples that its checkpoint says are trained
  TimePoint lost_at{};                                  // when its node was lost, or it was silent there
  std::string lost_why;
  bool registered : 1 = false, connected_node : 1 = false, weighs : 1 = false, passes_on : 1 = false;
  std::uint16_t versions = 0;  // names what it and its daemon speak
  std::int32_t pid = 0;
  std::uint64_t daemon = 0;            // that it is behind
  Declaration* declaration = nullptr;  // null: it has never registered
  RankTexts texts;
};

struct ReplicaState {
  Incarnation incarnation;
  bool begun_here = false;       // this coordinator has given it out, and so knows who was given which place
  std::vector<RankState> ranks;  // all of the job's, by number
  std::uint32_t registered = 0;  // of them
  // Some of its ranks have registered, and some have not: how many, and since when it has been so many.
  struct Incomplete {
    TimePoint since{};
    std::uint32_t registered = 0;
    bool told = false;
  } incomplete{};
  Statuses statuses;
  RankSet caught_up;  // of this incarnation, ever: a daemon that is started again has to find it out anew
};

// "rank 3 has not", "ranks 3, 5-7 have not".
std::string missing_ranks(const ReplicaState& replica);

using Replicas = std::map<ReplicaId, ReplicaState>;

}  // namespace rejoin::membership
