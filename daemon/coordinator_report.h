// Reports a coordinator's decisions, wherever they are kept: in events, log lines, messages to nodes and the status.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "daemon/job_history.h"
#include "daemon/node_listener.h"
#include "membership/coordinator.h"
#include "membership/replicated_coordinator.h"

namespace rejoin::daemon {

// Emits the events of records that have just been kept for good.
void emit_events(const std::vector<proto::LogRecord>& records);
// Emits where the job stands. A coordinator that goes on from what another had decided calls it, since that one may
// have been killed after it wrote something down and before it emitted it.
void emit_recovered(const membership::Coordinator& machine);

// Sends messages to nodes. `page` is the address of this process's page, which goes along with Registered.
void send_all(NodeListener& nodes, const std::vector<std::pair<std::vector<membership::NodeId>, proto::ToNode>>& send,
              const std::vector<membership::NodeId>& close, const std::string& page);

// The times that it takes to keep what is decided.
using WriteTimes = membership::ReplicatedCoordinator::Latency;

// Ends the process when decisions can't be kept any more: deciding without remembering could decide twice. Ranks wait;
// a restarted coordinator goes on from what was kept. A status of 2, after which supervisors start nothing, is for what
// somebody must mend first: settings that are wrong, a log that was cut.
[[noreturn]] void end_of_deciding(const std::string& why, int status = 4);

nlohmann::json status_of(const membership::Coordinator& machine, const NodeListener& nodes, TimePoint now);
nlohmann::json status_of(const WriteTimes& times);
// Returns who or what makes each step longer than the others would: replicas that compute more slowly, otherwise a hop.
nlohmann::json stragglers_of(const membership::Coordinator& machine, const JobHistory& history, TimePoint now);

// Returns what daemons tell of members that catch up and reach nobody to catch up from, for the alarms.
std::vector<std::string> unreached_of(const membership::Coordinator& machine, const JobHistory& history, TimePoint now);

}  // namespace rejoin::daemon
