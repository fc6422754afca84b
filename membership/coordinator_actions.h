// What comes out of a coordinator's decisions.
#pragma once

#include <utility>
#include <vector>

#include "base/ids.h"
#include "control.pb.h"
#include "membership/note.h"

namespace rejoin::membership {

using NodeId = Id<struct NodeTag>;  // one connection of a daemon or relay; never reused

struct Actions {
  std::vector<proto::LogRecord> append;                             // durable before anything is sent
  std::vector<std::pair<std::vector<NodeId>, proto::ToNode>> send;  // one message, to all of them
  std::vector<NodeId> close;  // after sending: what still comes over these connections must not be heard
  std::vector<Note> notes;    // what happened
};

}  // namespace rejoin::membership
