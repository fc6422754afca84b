// What a coordinator tells of its decisions, wherever they are kept: events, log lines, messages to nodes, the status.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "daemon/job_history.h"
#include "daemon/node_listener.h"
#include "membership/coordinator.h"
#include "membership/replicated_coordinator.h"

namespace rejoin::daemon {

// The events of records that are kept from now on, whatever happens.
void emit_events(const std::vector<proto::LogRecord>& records);
// Where the job stands, by one that goes on from what another had decided: that one may have been killed after it wrote
// something down, and before it emitted it.
void emit_recovered(const membership::Coordinator& machine);

// `page`: where this process's page is, of which nodes are told.
void send_all(NodeListener& nodes, const std::vector<std::pair<std::vector<membership::NodeId>, proto::ToNode>>& send,
              const std::vector<membership::NodeId>& close, const std::string& page);

// How long it takes to keep what is decided.
using WriteTimes = membership::ReplicatedCoordinator::Latency;

// Deciding without remembering could decide twice. Ranks wait; a restarted coordinator goes on from what was kept.
[[noreturn]] void end_of_deciding(const std::string& why);

nlohmann::json status_of(const membership::Coordinator& machine, const NodeListener& nodes, TimePoint now);
nlohmann::json status_of(const WriteTimes& times);
// Who or what makes each step longer than the others would: replicas that compute more slowly, and otherwise a hop.
nlohmann::json stragglers_of(const membership::Coordinator& machine, const JobHistory& history, TimePoint now);

}  // namespace rejoin::daemon
