// Logging: spdlog, one logger a process, lines on stderr with date and time in UTC, so that several machines' line up.
#pragma once

#include <spdlog/spdlog.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>

namespace rejoin {

inline constexpr std::array<std::string_view, 6> kLogLevels{"trace", "debug", "info", "warn", "error", "off"};

// Call once from main. `who` heads every line, e.g. "rejoind r0" or "trainer r1.0". Level: one of these.
void init_logging(const std::string& who, const std::string& level);

// Where lines go: spdlog's default logger, unless another one is set, which then lives as long as the process, whatever
// a program that shares spdlog does with it. Any thread.
spdlog::logger& logger();
// Called by whoever logs while none is set: it may set one. Before there are threads.
void set_logger_at_need(void (*set)());
// Null: the default one again; those before are given back, so nobody may be writing any more.
void set_logger(std::shared_ptr<spdlog::logger> its);

// Standard error, which nobody may read: a terminal that was stopped, a full pipe; a file's disk may stand still
// (log_file.h). Who logs stands still for 10 ms at most (one second for a critical line). What is not taken is left
// out, and how much is said with the next line. A line has the date and the time in UTC, the level and the logger's
// name; where it goes to systemd's journal, the level as that knows it before. One for all loggers. Any thread.
std::shared_ptr<spdlog::sinks::sink> standard_error();

}  // namespace rejoin
