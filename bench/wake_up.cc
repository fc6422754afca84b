#include "bench/wake_up.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/fail.h"
#include "base/fd.h"
#include "bench/job_times.h"

namespace rejoin::bench {

namespace {

constexpr int kTimes = 1000;

// Sleeps until there is something, and takes it; false after 10 s without.
bool await(const Fd& bell) {
  pollfd waiting{.fd = bell.get(), .events = POLLIN, .revents = 0};
  std::uint64_t count = 0;
  return ::poll(&waiting, 1, 10'000) == 1 && ::read(bell.get(), &count, sizeof count) == sizeof count;
}

double us(Duration time) { return seconds(time) * 1e6; }

}  // namespace

Result<double> wake_up_us() {
  auto there = make_eventfd(), back = make_eventfd();
  if (!there) return tl::unexpected(there.error());
  if (!back) return tl::unexpected(back.error());
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (await(*there)) signal_eventfd(*back);
    ::_exit(0);
  }
  const SteadyClock clock;
  bool woken = true;
  std::vector<double> times;
  for (int i = 0; i < kTimes && woken; ++i) {
    const TimePoint start = clock.now();
    signal_eventfd(*there);
    woken = await(*back);
    times.push_back(us(clock.now() - start) / 2);
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  if (!woken) return fail(ErrorCode::timeout, "a process was not woken within 10 s");
  return Distribution(std::move(times)).at(0.5);
}

}  // namespace rejoin::bench
