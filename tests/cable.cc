#include "tests/cable.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

namespace rejoin::test {

Cable::Cable(std::string network, std::chrono::microseconds one_way)
    : one_way_(one_way), stop_(::eventfd(0, EFD_CLOEXEC)), thread_([this, network] { run(network); }) {}

Cable::~Cable() {
  (void)::eventfd_write(stop_.get(), 1);
  thread_.join();
}

void Cable::run(const std::string& network) {
  std::string why = lay(network);
  const bool laid = why.empty();
  laid_.set_value(std::move(why));
  if (laid) carry();
}

// A thread has a network namespace of its own.
std::string Cable::lay(const std::string& network) {
  const auto failed = [](const std::string& what) { return what + ": " + std::strerror(errno); };
  const Fd there(::open(network.c_str(), O_RDONLY | O_CLOEXEC));
  if (!there || ::setns(there.get(), CLONE_NEWNET) != 0) return failed(network);
  for (int end = 0; end < 2; ++end) {
    ends_[end] = Fd(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
    ifreq request{};
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    std::strcpy(request.ifr_name, end == 0 ? "cable0" : "cable1");
    if (!ends_[end] || ::ioctl(ends_[end].get(), TUNSETIFF, &request) != 0) return failed("/dev/net/tun");
  }
  return "";
}

void Cable::carry() {
  using Clock = std::chrono::steady_clock;
  struct Frame {
    Clock::time_point due;
    int to = 0;
    std::vector<char> bytes;
  };
  std::deque<Frame> under_way;  // in the order in which they are due
  std::array<pollfd, 3> wait{{{stop_.get(), POLLIN, 0}, {ends_[0].get(), POLLIN, 0}, {ends_[1].get(), POLLIN, 0}}};
  std::array<char, 65536> buffer;
  while ((wait[0].revents & POLLIN) == 0) {
    const auto left = under_way.empty() ? std::chrono::seconds(1) : under_way.front().due - Clock::now();
    const auto ns = std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count());
    const timespec limit{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    if (::ppoll(wait.data(), wait.size(), &limit, nullptr) < 0 && errno != EINTR) return;
    for (int end = 0; end < 2; ++end)
      for (ssize_t size; (size = ::read(ends_[end].get(), buffer.data(), buffer.size())) > 0;)
        under_way.push_back({Clock::now() + one_way_, 1 - end, {buffer.data(), buffer.data() + size}});
    for (; !under_way.empty() && under_way.front().due <= Clock::now(); under_way.pop_front()) {
      const Frame& frame = under_way.front();
      (void)!::write(ends_[frame.to].get(), frame.bytes.data(), frame.bytes.size());  // lost, where there is no room
    }
  }
}

}  // namespace rejoin::test
