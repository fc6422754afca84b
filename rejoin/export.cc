// librejoin.so is made of the modules' objects; this names its version, and says where its lines go in programs that
// open nothing but a transport's engine.
#include "base/log.h"
#include "rejoin/c.h"
#include "rejoin/prepare_process.h"

[[maybe_unused]] static const bool logs = (rejoin::set_logger_at_need(rejoin::log_to_stderr_by_default), true);

extern "C" const char* rejoin_version(void) { return REJOIN_VERSION; }
