// The forms that settings have.
#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include "base/command_line.h"
#include "base/ids.h"
#include "membership/job_config.h"

namespace rejoin::daemon {

constexpr std::string_view kEtcd = "etcd:";  // before the addresses of an etcd cluster

// From 0; without this check -1 would be the largest there is.
ValueCheck whole_number(std::uint64_t most = ~std::uint64_t{0});
ValueCheck number_from_0();    // a real one, to a billion
ValueCheck listen_address();   // HOST:PORT; port 0 lets the system choose
ValueCheck peer_address();     // HOST:PORT
ValueCheck peer_addresses();   // HOST:PORT,HOST:PORT…, none of them twice
ValueCheck store_name();       // file, or etcd:HOST:PORT,HOST:PORT…
ValueCheck job_name();         // letters, digits, . _ -
ValueCheck file_name();        // not empty: of a flag that was to have a value
ValueCheck advertised_host();  // HOST, or HOST,HOST… with one for each rail
ValueCheck node_name();        // UTF-8 that prints, a line of 255 bytes at most: for messages and logs
ValueCheck socket_name();
ValueCheck flight_directory();  // or off
ValueCheck audit_period();      // auto, off, or steps
ValueCheck replica_at_step();   // REPLICA@STEP
std::optional<std::pair<ReplicaId, Step>> parse_replica_at_step(std::string_view text);
ValueCheck roll_back_word();  // STEP, or STEP@STEPS
std::optional<membership::JobConfig::RollBack> parse_roll_back(std::string_view text);
// For settings that may be left out: a settings file then says "".
ValueCheck or_none(ValueCheck right);
ValueCheck location();  // NAME/NAME…
ValueCheck transport_name();
ValueCheck log_level();

}  // namespace rejoin::daemon
