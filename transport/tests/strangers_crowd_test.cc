// Strangers in crowds: on all rails of a process together; and a peer with the secret that is broken.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "transport/strangers.h"
#include "transport/tests/strangers_support.h"

namespace rejoin::transport::tcp {
namespace {

TEST(Strangers, OfAllListenersOfAProcessAreCountedTogetherAndEachHasAFew) {
  Strangers crowded, other;
  std::uint64_t next = 0;
  const TimePoint now = SteadyClock().now();
  for (std::size_t i = 0; i < Strangers::kMost; ++i) crowded.add(EndpointId(++next), now);
  for (std::size_t i = 0; i < Strangers::kFew; ++i) other.add(EndpointId(++next), now);
  EXPECT_FALSE(other.to_go(now)) << "where others crowd, it has its few";
  for (std::uint64_t i = 1; i <= Strangers::kFew; ++i) {
    ASSERT_EQ(crowded.to_go(now), EndpointId(i));
    crowded.refuse(EndpointId(i), ErrorCode::timeout, "", Strangers::kTooLate);
  }
  EXPECT_FALSE(crowded.to_go(now));
  other.add(EndpointId(++next), now);
  EXPECT_EQ(other.to_go(now), EndpointId(Strangers::kMost + 1)) << "and its own go for more";
}

std::size_t descriptors_open() {
  const auto files = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

// Silent callers of each of these, so many, in a process of their own, which has the descriptors of its ends.
class Crowd {
 public:
  Crowd(const std::vector<std::unique_ptr<Listener>>& rails, int of_each) {
    EXPECT_EQ(::pipe2(ends_, O_CLOEXEC), 0);
    child_ = ::fork();
    if (child_ != 0) return;
    for (int i = 0; i < of_each; ++i)
      for (const auto& rail : rails) (new Stranger(rail->port))->send(Bytes(1));
    (void)!::write(ends_[1], "1", 1);
    ::pause();
    ::_exit(0);
  }
  ~Crowd() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    for (const int end : ends_) ::close(end);
  }
  // Whether all have called.
  bool complete() const {
    pollfd waiting{ends_[0], POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }

 private:
  int ends_[2]{};
  pid_t child_ = -1;
};

// Each rail has a listener of its own.
struct Rails {
  explicit Rails(int count) {
    for (int i = 0; i < count; ++i) listeners.push_back(std::make_unique<Listener>());
  }
  // Polls until this is so, and returns how many descriptors were open at most.
  template <typename Until>
  std::size_t poll(Until until) {
    std::size_t most = 0;
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
      const bool all = until();  // and now they are taken
      std::vector<pollfd> waiting;
      for (auto& each : listeners) {
        each->poll();
        waiting.push_back({each->engine->event_fd(), POLLIN, 0});
      }
      most = std::max(most, descriptors_open());
      return all && ::poll(waiting.data(), waiting.size(), 0) == 0;
    }));
    return most;
  }
  std::vector<std::unique_ptr<Listener>> listeners;
};

TEST(StrangersOfTcp, OnAllRailsAreNoMoreThanOnOne) {
  Rails rails(4);
  const std::size_t before = descriptors_open() + 2;  // with the pipe
  const Crowd crowd(rails.listeners, 200);
  constexpr std::size_t kTaken = 64;  // at once by a listener, before any goes
  const std::size_t most = rails.poll([&] { return crowd.complete(); });
  EXPECT_LE(most, before + Strangers::kMost + 4 * Strangers::kFew + kTaken);
  EXPECT_FALSE(connect_with(*rails.listeners[3], kKey));
}

TEST(StrangersOfTcp, LeaveTheLastQuarterOfTheDescriptorsToOthers) {
  Rails rails(4);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const Crowd crowd(rails.listeners, 200);
  const std::size_t limit = descriptors_open() + 200;
  const rlimit low{static_cast<rlim_t>(limit), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const std::size_t most = rails.poll([&] { return crowd.complete(); });
  EXPECT_LE(most, limit - limit / 4 + 4 * (Strangers::kFew + 1) + 1);
  EXPECT_LT(most, limit);
  EXPECT_FALSE(connect_with(*rails.listeners[3], kKey));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

// It has the secret, and says that it has answered.
TEST(StrangersOfTcp, AReadIsNotOverByAnAcknowledgementWithoutBytes) {
  Listener listener;
  Stranger peer(listener.port);
  ASSERT_TRUE(comes_in(listener, peer));
  Bytes target(8);
  const RegionId region = listener.engine->register_region(target, MemoryKind::host, Access::local).value();
  const Read read{.context = 5, .local = {region, 0}, .remote = {{1, target.size()}, 0}, .length = target.size()};
  ASSERT_TRUE(listener.engine->read(listener.accepted[0], {{read}}));
  wire::Header asked;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    const Bytes got = peer.received().value_or(Bytes());
    if (got.size() < sizeof asked) return false;
    BytesView last = BytesView(got).last(sizeof asked);
    return take(last, asked) && asked.kind == wire::Kind::read_request;
  }));
  wire::Header header{.kind = wire::Kind::acknowledge, .operation = asked.operation};
  header.digest = wire::digest_of_header(header);
  peer.send(bytes_of(header));
  std::vector<std::optional<Error>> completed;
  std::optional<Error> end;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : listener.engine->poll()) {
      if (event.kind == EventKind::completed) completed.push_back(event.error);
      if (event.kind == EventKind::closed) end = event.error;
    }
    return end.has_value();
  }));
  ASSERT_EQ(completed.size(), 1u);
  EXPECT_TRUE(completed[0]);
  EXPECT_THAT(end->message, testing::HasSubstr("in the place of what is read"));
}

}  // namespace
}  // namespace rejoin::transport::tcp
