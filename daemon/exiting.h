// Whether a process is at its end, while the kernel still takes apart what it had.
#pragma once

#include <filesystem>

namespace rejoin::daemon {

// A process that is killed, or exits, gives back its memory, then its files, a GPU's context among them. Only then is
// its pidfd readable; its sockets are closed in between. That takes a third of a second for each GiB. This is true from
// before that on: none of its threads is in a system call or runs again. False, too, where that can't be told.
// `proc`: /proc, or what a test has in its place.
bool is_exiting(int pidfd, const std::filesystem::path& proc = "/proc");

}  // namespace rejoin::daemon
