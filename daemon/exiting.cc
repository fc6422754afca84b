#include "daemon/exiting.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace rejoin::daemon {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kExiting = 0x4;  // the kernel's PF_EXITING, which a thread gets in do_exit() and keeps

template <typename Number>
std::optional<Number> number_in(const std::string& text) {
  Number number{};
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  return read.ec == std::errc() ? std::optional(number) : std::nullopt;
}

// The folder of the pidfd's process in this /proc, which may be of another PID namespace than this process. The number
// of one that is gone may be another's by now: the pidfd has none then.
std::optional<fs::path> folder_of(int pidfd, const fs::path& proc) {
  const std::string name = "Pid:\t";
  std::ifstream in(proc / "self/fdinfo" / std::to_string(pidfd));
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(name)) continue;
    const auto number = number_in<int>(line.substr(name.size()));
    return number && *number > 0 ? std::optional(proc / std::to_string(*number)) : std::nullopt;
  }
  return std::nullopt;
}

// What proc(5) says of a thread, or a process, which tells of its first thread, from field 2 on, the rest of its name.
std::vector<std::string> fields_of(const fs::path& folder) {
  std::ifstream in(folder / "stat");
  std::string stat;  // of a process that has ended since the file was opened none: a read fails then
  std::getline(in, stat, '\0');
  const auto name_ends = stat.rfind(')');  // a name may hold blanks and brackets, too
  if (name_ends == std::string::npos) return {};
  return split(std::string_view(stat).substr(name_ends), ' ');
}

std::optional<std::uint64_t> field(const std::vector<std::string>& fields, std::size_t number) {
  return fields.size() > number - 2 ? number_in<std::uint64_t>(fields[number - 2]) : std::nullopt;
}

bool has_flag(const fs::path& folder) {
  const auto flags = field(fields_of(folder), 9);
  return flags && (*flags & kExiting) != 0;
}

std::vector<fs::path> threads_of(const fs::path& process) {
  std::error_code error;
  std::vector<fs::path> threads;
  for (fs::directory_iterator at(process / "task", error), end; !error && at != end; at.increment(error))
    threads.push_back(at->path());
  return error ? std::vector<fs::path>{} : threads;
}

}  // namespace

bool is_exiting(int pidfd, const fs::path& proc) {
  const auto process = folder_of(pidfd, proc);
  if (!process || !has_flag(*process)) return false;  // one that lives is seldom asked about more
  // The first thread may have ended alone; and another may have started one more after they were listed, and ended
  // before it was looked at.
  const auto threads = threads_of(*process);
  if (threads.empty() || !std::ranges::all_of(threads, has_flag)) return false;
  const auto since = threads_of(*process);
  return !since.empty() && std::ranges::all_of(since, [&](const fs::path& thread) {
    return std::ranges::find(threads, thread) != threads.end();
  });
}

std::optional<std::uint64_t> began(pid_t process, const fs::path& proc) {
  if (process <= 0) return std::nullopt;  // of another PID namespace
  const auto fields = fields_of(proc / std::to_string(process));
  const bool ended = fields.size() < 2 || fields[1] == "Z" || fields[1] == "X";
  return ended ? std::nullopt : field(fields, 22);
}

}  // namespace rejoin::daemon
