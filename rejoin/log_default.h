// The library's part in rejoin/log.h.
#pragma once

namespace rejoin {

// Lines go to standard error, where nobody has said otherwise: spdlog's own default, standard output, is the program's.
void log_to_stderr_by_default();

}  // namespace rejoin
