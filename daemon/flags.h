// The forms that settings have.
#pragma once

#include "base/command_line.h"

namespace rejoin::daemon {

ValueCheck whole_number();     // from 0 on; without this check -1 is the largest there is
ValueCheck number_from_0();    // finite
ValueCheck listen_address();   // HOST:PORT; port 0 lets the system choose
ValueCheck peer_address();     // HOST:PORT
ValueCheck advertised_host();  // HOST, or HOST,HOST… with one for each rail
ValueCheck socket_name();
// For settings that may be left out: a settings file then says "".
ValueCheck or_none(ValueCheck right);
ValueCheck transport_name();
ValueCheck log_level();

}  // namespace rejoin::daemon
