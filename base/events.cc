#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>

#include "base/clock.h"
#include "base/event_file.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/flight.h"
#include "base/log.h"
#include "base/no_signals.h"

namespace rejoin::events {

namespace {

std::atomic<bool> written = false;  // events are, to `file`
std::mutex mutex;                   // guards the next three
Fd file;
std::string path, speaker;

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\', out += c;
    else if (static_cast<unsigned char>(c) < 0x20) out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else out += c;
  }
  return out + "\"";
}

std::string shown(const Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return json_text(*text);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{:.9g}", *number);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *number);
  return fmt::format("{}", std::get<std::uint64_t>(value));
}

// All of it, or nothing: what a full disk has taken of a line is cut off again. Gives errno, or 0.
int put(std::string_view line) {
  const NoSignalsOfWriting none;
  std::size_t wrote = 0;
  while (wrote < line.size()) {
    const ssize_t more = ::write(file.get(), line.data() + wrote, line.size() - wrote);
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) {
      const int error = more < 0 ? errno : ENOSPC;
      struct stat now {};
      if (wrote > 0 && ::fstat(file.get(), &now) == 0)
        (void)!::ftruncate(file.get(), now.st_size - static_cast<off_t>(wrote));
      return error;
    }
    wrote += static_cast<std::size_t>(more);
  }
  return 0;
}

}  // namespace

Result<> open(const std::string& directory, const std::string& who) {
  if (directory.empty()) return {};
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return fail(ErrorCode::io, "event directory {}: {}", directory, error.message());
  std::string name = fmt::format("{}/{}.{}.jsonl", directory, flight::in_file_name(who), ::getpid());
  Fd opened(::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!opened) return fail_errno(fmt::format("event file {}", name));
  const std::lock_guard lock(mutex);
  file = std::move(opened);
  path = std::move(name);
  speaker = who;
  written = true;
  return {};
}

void open_file(const std::string& directory, const std::string& who) {
  if (auto opened = open(directory, who); !opened)
    logger().warn("no events of this process are written (--events): {}", opened.error().message);
}

void emit(std::string_view kind, const Fields& fields) {
  if (!written) return;
  std::unique_lock lock(mutex);
  if (!written) return;
  std::string line = fmt::format("{{\"t\":{},\"who\":{},\"kind\":{}", SteadyClock().now().time_since_epoch().count(),
                                 json_text(speaker), json_text(kind));
  for (const auto& [name, value] : fields) line += fmt::format(",{}:{}", json_text(name), shown(value));
  line += "}\n";
  // One write of one line, in this thread: it has to be there before others act on what it tells, whoever is killed.
  // See "Log files on disks that stand still". A full disk, or a file that may not grow, costs the events, not the
  // process.
  const int error = put(line);
  if (error == 0) return;
  written = false;
  const std::string its = path;
  lock.unlock();
  logger().warn("event file {}: {}: no more events of this process are written", its, std::strerror(error));
}

void record(Kind kind, const Numbers& numbers, std::string_view text) {
  flight::record(kind, numbers, text);
  if (!written) return;
  const Traits& its = traits(kind);
  if (!its.in_event_files) return;
  Fields fields;
  const auto add = [&](std::string_view name, std::uint64_t value) {
    if (name.ends_with('?')) fields.emplace_back(name.substr(0, name.size() - 1), value != 0);
    else if (!name.empty()) fields.emplace_back(name, value);
  };
  if (its.step) add("step", numbers.step);
  if (its.epoch) add("epoch", numbers.epoch);
  add(its.replica, numbers.replica);
  add(its.number, numbers.number);
  add(its.a, numbers.a);
  add(its.b, numbers.b);
  const std::size_t end = its.more_text.empty() && !names_members(kind) ? text.size() : text.find('\n');
  if (!its.text.empty()) fields.emplace_back(its.text, std::string(text.substr(0, end)));
  if (!its.more_text.empty() && end < text.size())
    fields.emplace_back(its.more_text, std::string(text.substr(end + 1)));
  emit(its.name, fields);
}

}  // namespace rejoin::events
