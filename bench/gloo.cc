#include "bench/gloo.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "base/fail.h"
#include "base/fd.h"
#include "bench/gloo_recovery.h"  // made of gloo_recovery.py

namespace rejoin::bench {

Result<std::vector<double>> gloo_recovery(const std::string& python, std::uint32_t members, std::uint64_t bytes,
                                          int rounds) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail_errno("pipe2");
  const Fd in(ends[0]);
  Fd out(ends[1]);
  const std::string arguments[] = {std::to_string(members), std::to_string(bytes), std::to_string(rounds)};
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::dup2(out.get(), 1) < 0 || ::dup2(out.get(), 2) < 0) ::_exit(127);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    ::execlp(python.c_str(), python.c_str(), "-c", kGlooRecovery, arguments[0].c_str(), arguments[1].c_str(),
             arguments[2].c_str(), nullptr);
    std::fprintf(stderr, "%s: %s\n", python.c_str(), std::strerror(errno));
    ::_exit(127);
  }
  out = Fd();
  std::string said;
  std::array<char, 4096> some{};
  for (ssize_t got = 0; (got = ::read(in.get(), some.data(), some.size())) != 0;) {
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) break;
    said.append(some.data(), static_cast<std::size_t>(got));
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  std::vector<double> times;
  std::string line, last;
  for (std::istringstream lines(said); std::getline(lines, line);) {
    char* end = nullptr;
    const double time = std::strtod(line.c_str(), &end);
    if (end != line.c_str() && *end == 0) times.push_back(time);
    else if (!line.empty()) last = line;
  }
  if (status != 0 || times.size() != static_cast<std::size_t>(rounds))
    return fail(ErrorCode::unavailable, "{}", last.empty() ? "the script of " + python + " has said nothing" : last);
  return times;
}

}  // namespace rejoin::bench
