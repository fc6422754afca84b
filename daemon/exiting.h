// Whether a process is at its end, while the kernel still takes apart what it had.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace rejoin::daemon {

// A process that is killed, or exits, gives back its memory, then its files, a GPU's context among them. Only then is
// its pidfd readable; its sockets are closed in between. That takes a third of a second for each GiB. This is true from
// before that on: none of its threads is in a system call or runs again. False, too, where that can't be told.
// `proc`: /proc, or what a test has in its place.
bool is_exiting(int pidfd, const std::filesystem::path& proc = "/proc");

// When the process began, as the system counts: two that have one number, one after the other, differ in that. Nothing:
// there is none, or it has ended and its parent has not asked for that yet.
std::optional<std::uint64_t> began(pid_t process, const std::filesystem::path& proc = "/proc");

}  // namespace rejoin::daemon
