// Says where the library's log lines go. The library logs little: what other replicas do to this one's connections, and
// what it does about them. Errors are results of the calls.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#pragma GCC visibility push(default)
namespace rejoin {

enum class LogLevel : std::uint8_t { trace, debug, info, warn, error, off };

// Takes a line, without its end. Calls come one at a time, from any of the library's threads, which wait for it: a sink
// should not take long, and may call nothing of this library.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

// Has the library's lines go to `sink` from now on, and with an empty sink to standard error again; when it has
// returned, the sink before is not called any more. One line always goes to standard error: that a REJOIN_* variable is
// none of Rejoin's. Thread: any. The library logs by an spdlog of its own, which a program's neither sees nor
// disturbs: where a program uses spdlog, a sink joins the two.
void set_log(LogSink sink);

// Leaves out lines of a lower level; at first it is `info`. Thread: any.
void set_log_level(LogLevel level);

}  // namespace rejoin

#pragma GCC visibility pop
