// The forms of settings, as CLI11 checks them: what is wrong is said behind the flag's name.
#pragma once

#include <CLI/CLI.hpp>

namespace rejoin::daemon {

CLI::Validator whole_number();    // from 0 on; CLI11 itself takes -1 for the largest there is
CLI::Validator number_from_0();   // finite
CLI::Validator listen_address();  // HOST:PORT; port 0 lets the system choose
CLI::Validator peer_address();    // HOST:PORT
CLI::Validator socket_name();
// For settings that may be left out: a settings file then says "".
CLI::Validator or_none(CLI::Validator right);
CLI::Validator transport_name();
CLI::Validator log_level();

}  // namespace rejoin::daemon
