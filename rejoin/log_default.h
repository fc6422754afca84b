// The library's part in rejoin/log.h.
#pragma once

namespace rejoin {

// Lines go to standard error, unless the program has set another sink: spdlog's own default, standard output, is the
// program's.
void log_to_stderr_by_default();

}  // namespace rejoin
