#include "bench/probe/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::bench {

Result<std::string> text_of_a_process(Duration limit, const std::function<std::string()>& what) {
  int ends[2];
  if (::pipe(ends) != 0) return fail_errno("a pipe");
  const Fd out(ends[1]);
  Fd in(ends[0]);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text;
    try {
      text = fmt::format(" {}", what());
    } catch (const std::exception& failure) {
      text = fmt::format("! {}", failure.what());
    }
    (void)!::write(out.get(), text.data(), text.size());
    ::_exit(0);  // threads may stand in the driver
  }
  std::string text;
  const SteadyClock clock;
  const TimePoint deadline = clock.now() + limit;
  bool ended = false;
  while (!ended && clock.now() < deadline) {
    pollfd ready{in.get(), POLLIN, 0};
    if (::poll(&ready, 1, 10) == 1) {
      char some[4096];
      const auto got = ::read(in.get(), some, sizeof some);
      if (got > 0) text.append(some, static_cast<std::size_t>(got));
    }
    int status = 0;
    ended = ::waitpid(child, &status, WNOHANG) == child;
    if (ended && WIFSIGNALED(status)) return fail(ErrorCode::io, "it ended by signal {}", WTERMSIG(status));
  }
  if (!ended) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    return fail(ErrorCode::timeout, "it hung for {:.1f} s", seconds(limit));
  }
  for (pollfd ready{in.get(), POLLIN, 0}; ::poll(&ready, 1, 0) == 1 && (ready.revents & POLLIN) != 0;) {
    char some[4096];
    const auto got = ::read(in.get(), some, sizeof some);
    if (got <= 0) break;
    text.append(some, static_cast<std::size_t>(got));
  }
  if (text.starts_with("! ")) return fail(ErrorCode::io, "{}", text.substr(2));
  return text.empty() ? text : text.substr(1);
}

Outcome in_a_process(Duration limit, const std::function<std::vector<double>()>& probe) {
  const auto text = text_of_a_process(limit, [&] { return fmt::format("{}", fmt::join(probe(), " ")); });
  if (!text) return {{}, text.error().message};
  Outcome result;
  std::istringstream values(*text);
  for (double value = 0; values >> value;) result.values.push_back(value);
  return result;
}

void pause(Duration time) { (void)::poll(nullptr, 0, static_cast<int>(milliseconds(time))); }

}  // namespace rejoin::bench
