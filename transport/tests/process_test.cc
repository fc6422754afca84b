// What only real processes can show: a peer killed at many points of a transfer, and one stopped and continued.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "transport/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/backends.h"
#include "transport/tests/same_bytes.h"
#include "transport/tests/within.h"

namespace rejoin::transport {
namespace {

using std::chrono::steady_clock;
constexpr std::uint64_t kCount = 64, kSize = 1 * MiB;

// A child process that connects to `server`, learns the target from its first message, and writes to it for ever.
[[noreturn]] void write_for_ever(const std::string& transports, const std::string& server) {
  auto engine = *make_engine(transports);
  auto endpoint = *engine->connect({server}, {});
  std::vector<std::byte> from(kSize, static_cast<std::byte>(0x41));
  const RegionId source = *engine->register_region(from, MemoryKind::host, kAnyAccess);
  RemoteRegion target;
  std::uint64_t next = 0;
  const auto post = [&] {
    const Write write{.context = next,
                      .local = {source, 0},
                      .remote = {target, (next % kCount) * kSize},
                      .length = kSize,
                      .notify = next};
    ++next;
    if (!engine->write(endpoint, {&write, 1})) _exit(0);
  };
  for (;;)
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::closed) _exit(0);
      if (event.kind == EventKind::message) {
        std::memcpy(&target, event.message.data(), sizeof target);
        for (int i = 0; i < 4; ++i) post();
      }
      if (event.kind == EventKind::completed) post();
    }
}

struct Writer {
  pid_t pid = -1;
  ~Writer() {
    if (pid > 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
};

struct Processes : testing::TestWithParam<std::string> {
  std::unique_ptr<Engine> engine;
  std::string address;
  std::vector<std::byte> to = std::vector<std::byte>(kCount * kSize);
  RegionId target;
  EndpointId endpoint;
  std::uint64_t landed = 0;
  bool accepted = false;
  bool closed = false;

  // Starts the child before any engine exists here, since UCX and fork don't mix; the address goes through a pipe.
  std::unique_ptr<Writer> start() {
    auto writer = std::make_unique<Writer>();
    int pipe_fds[2];
    EXPECT_EQ(::pipe(pipe_fds), 0);
    writer->pid = ::fork();
    if (writer->pid == 0) {
      char text[4096] = {};
      if (::read(pipe_fds[0], text, sizeof text - 1) <= 0) _exit(1);
      write_for_ever(GetParam(), text);
    }
    engine = *make_engine(GetParam());
    address = engine->listen({"127.0.0.1:0"})->text;
    EXPECT_EQ(::write(pipe_fds[1], address.data(), address.size()), static_cast<ssize_t>(address.size()));
    ::close(pipe_fds[0]);
    ::close(pipe_fds[1]);
    target = *engine->register_region(to, MemoryKind::host, kAnyAccess);
    landed = 0;
    accepted = false;
    closed = false;
    return writer;
  }

  bool until(const std::function<bool()>& done) {
    const auto deadline = steady_clock::now() + std::chrono::seconds(20);
    while (!done()) {
      if (steady_clock::now() > deadline) return false;
      for (const auto& event : engine->poll()) {
        if (event.kind == EventKind::accepted) {
          endpoint = event.endpoint;
          accepted = true;
          const RemoteRegion remote = engine->remote(target);
          EXPECT_TRUE(engine->send(endpoint, bytes_of(remote)));
        }
        landed += event.kind == EventKind::written;
        closed |= event.kind == EventKind::closed;
      }
    }
    return true;
  }
};

TEST_P(Processes, APeerKilledAtAnyPointOfItsWritesEndsInClosed) {
  std::vector<std::uint64_t> points{0, 1, 2, 3, 5, 8, 13, 40, 100};
  if (GetParam().starts_with("ibverbs")) points = {0, 1, 5, 20};  // every packet is made by the VM's emulated processor
  for (const auto point : points) {
    auto writer = start();
    ASSERT_TRUE(until([&] { return accepted && landed >= point; })) << point;
    ::kill(writer->pid, SIGKILL);
    EXPECT_TRUE(until([&] { return closed; })) << "never saw the death after " << point << " writes";
    engine->close(endpoint);
    engine->deregister(target);
    engine.reset();
  }
}

TEST_P(Processes, AStoppedWriterIsFencedByClose) {
  auto writer = start();
  ASSERT_TRUE(until([&] { return landed >= 5; }));
  ::kill(writer->pid, SIGSTOP);
  engine->close(endpoint);
  const auto fenced = to;
  ::kill(writer->pid, SIGCONT);
  // The writer sees its endpoint closed and exits; nothing it still sends may land.
  int status = 0;
  ASSERT_TRUE(until([&] { return ::waitpid(writer->pid, &status, WNOHANG) == writer->pid; }));
  writer->pid = -1;
  EXPECT_TRUE(same_bytes(to, fenced));
}

// Its thread waits for the descriptor, and nothing wakes it: several times on end, until the time that it gave is over.
// (UCX looks after its peers five times a second.)
TEST_P(Processes, AnIdleEngineSleeps) {
  auto writer = start();
  ASSERT_TRUE(until([&] { return landed >= 5; }));
  ::kill(writer->pid, SIGSTOP);
  const auto deadline = steady_clock::now() + std::chrono::seconds(20);
  int slept = 0;
  while (slept < 5 && steady_clock::now() < deadline) {
    if (!engine->poll().empty() || !engine->arm()) {
      slept = 0;
      continue;
    }
    pollfd waiting{engine->event_fd(), POLLIN, 0};
    slept = ::poll(&waiting, 1, 20) == 0 ? slept + 1 : 0;
  }
  EXPECT_EQ(slept, 5) << "sleeps on end that nothing ended";
}

// As a pool of workers has them. It knows nothing of the connections whose descriptors it got.
TEST(ForkedChild, KeepsNoClosedConnectionUpAndNoEngineAwake) {
  for (const std::string transports : {"shm", "tcp", "tcp+aes", "tcp:127.0.0.1,127.0.0.2"}) {
    SCOPED_TRACE(transports);
    auto a = make_engine(transports).value(), b = make_engine(transports).value();
    const EndpointId there = a->connect(b->listen({"127.0.0.1:0"}).value(), {}).value();
    std::optional<EndpointId> accepted;
    bool connected = false, closed = false;
    const auto look = [&] {
      for (const auto& event : a->poll()) connected |= event.kind == EventKind::connected;
      for (const auto& event : b->poll()) {
        if (event.kind == EventKind::accepted) accepted = event.endpoint;
        closed |= event.kind == EventKind::closed;
      }
    };
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return look(), connected && accepted; }));
    const Writer child{::fork()};
    while (child.pid == 0) ::pause();
    a->close(there);
    ASSERT_TRUE(within(std::chrono::seconds(5), [&] { return look(), closed; })) << "the peer is not told";
    b->close(*accepted);
    for (Engine* engine : {a.get(), b.get()})
      EXPECT_TRUE(within(std::chrono::seconds(5), [&] {
        pollfd waiting{engine->event_fd(), POLLIN, 0};
        return engine->poll().empty() && engine->arm() && ::poll(&waiting, 1, 10) == 0;
      })) << "it is woken for what it has closed";
  }
}

TEST(ForkedChild, KeepsNoListenerUp) {
  for (const std::string transports : {"shm", "tcp"}) {
    SCOPED_TRACE(transports);
    auto a = make_engine(transports).value(), b = make_engine(transports).value();
    const Address address = b->listen({"127.0.0.1:0"}).value();
    const Writer child{::fork()};
    while (child.pid == 0) ::pause();
    b = make_engine(transports).value();
    std::optional<Error> end;
    if (auto called = a->connect(address, {}); !called) end = called.error();
    EXPECT_TRUE(within(std::chrono::seconds(5), [&] {
      for (const auto& event : a->poll())
        if (event.kind == EventKind::closed) end = event.error;
      return end.has_value();
    })) << "who calls it is not refused";
    EXPECT_TRUE(b->listen(address)) << "its port is still taken";
  }
}

TEST(ForkedChild, ThatCleansUpEndsNoConnectionOfItsParents) {
  auto a = make_engine("tcp").value(), b = make_engine("tcp").value();
  const EndpointId there = a->connect(b->listen({"127.0.0.1:0"}).value(), {}).value();
  bool connected = false, heard = false;
  const auto look = [&] {
    for (const auto& event : a->poll()) connected |= event.kind == EventKind::connected;
    for (const auto& event : b->poll()) {
      heard |= event.kind == EventKind::message;
      ASSERT_NE(event.kind, EventKind::closed);
    }
  };
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return look(), connected; }));
  const pid_t child = ::fork();
  if (child == 0) {
    a.reset();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ASSERT_TRUE(a->send(there, as_bytes("still here")));
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] { return look(), heard; }));
}

// A peer that is killed while a child of its lives, as a worker of a data loader does for a while.
TEST(ForkedChild, KeepsNoConnectionOfAKilledParentUp) {
  for (const std::string transports : {"shm", "tcp", "tcp:127.0.0.1,127.0.0.2"}) {
    SCOPED_TRACE(transports);
    std::array<int, 2> ends{}, told{};
    ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(told.data(), O_CLOEXEC), 0);
    const Writer parent{::fork()};
    if (parent.pid == 0) {
      std::array<char, 4096> text{};
      if (::read(ends[0], text.data(), text.size() - 1) <= 0) ::_exit(1);
      const auto engine = make_engine(transports).value();
      (void)engine->connect({text.data()}, {}).value();
      for (bool answered = false; !answered;)
        for (const auto& event : engine->poll()) answered |= event.kind == EventKind::message;
      const pid_t child = ::fork();
      if (child != 0) (void)!::write(told[1], &child, sizeof child);
      for (;;) ::pause();
    }
    const auto engine = make_engine(transports).value();
    const std::string address = engine->listen({"127.0.0.1:0"})->text;
    ASSERT_EQ(::write(ends[1], address.data(), address.size()), static_cast<ssize_t>(address.size()));
    bool closed = false;
    const auto look = [&] {
      for (const auto& event : engine->poll()) {
        if (event.kind == EventKind::accepted) (void)engine->send(event.endpoint, as_bytes("come in"));
        closed |= event.kind == EventKind::closed;
      }
      pollfd waiting{told[0], POLLIN, 0};
      return ::poll(&waiting, 1, 0) == 1;
    };
    ASSERT_TRUE(within(std::chrono::seconds(20), look));
    Writer child;
    ASSERT_EQ(::read(told[0], &child.pid, sizeof child.pid), static_cast<ssize_t>(sizeof child.pid));
    ASSERT_FALSE(closed);
    ::kill(parent.pid, SIGKILL);
    EXPECT_TRUE(within(std::chrono::seconds(5), [&] { return (void)look(), closed; })) << "it is not missed";
    for (const int end : {ends[0], ends[1], told[0], told[1]}) ::close(end);
  }
}

// Those of its parent's numbers at which it has a socket with a peer.
std::size_t connected_of(const std::vector<int>& numbers) {
  return static_cast<std::size_t>(std::ranges::count_if(numbers, [](int fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0;
  }));
}

TEST(ForkedChild, HasNoConnectionOfItsParentsAlsoWhereItMayHaveNoDescriptor) {
  auto a = make_engine("tcp").value(), b = make_engine("tcp").value();
  std::vector<int> numbers(1024);
  std::iota(numbers.begin(), numbers.end(), 0);
  const std::size_t others = connected_of(numbers);
  const Address address = b->listen({"127.0.0.1:0"}).value();
  for (int i = 0; i < 3; ++i) (void)a->connect(address, {}).value();
  int connected = 0;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : a->poll()) connected += event.kind == EventKind::connected ? 1 : 0;
    (void)b->poll();
    return connected == 3;
  }));
  ASSERT_EQ(connected_of(numbers), others + 6);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const rlim_t most : {before.rlim_cur, rlim_t{3}}) {
    const rlimit limit{most, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(static_cast<int>(connected_of(numbers) - others));
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << most;
  }
}

// What its parent's engine closes there is a number of its own, and never what has been opened meanwhile.
TEST(ForkedChild, ClosesNothingOfItsOwnWithItsParentsConnections) {
  auto a = make_engine("tcp").value(), b = make_engine("tcp").value();
  (void)a->connect(b->listen({"127.0.0.1:0"}).value(), {}).value();
  bool connected = false;
  const auto look = [&] {
    for (const auto& event : a->poll()) connected |= event.kind == EventKind::connected;
    (void)b->poll();
  };
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return look(), connected; }));
  for (const bool none_left : {false, true}) {
    const pid_t child = [&] {
      rlimit before{};
      ::getrlimit(RLIMIT_NOFILE, &before);
      std::vector<Fd> others;
      for (int i = 0; i < 64; ++i) others.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      const rlimit full{static_cast<rlim_t>(others.back().get()) + 1, before.rlim_max};  // all below it are taken
      if (none_left) ::setrlimit(RLIMIT_NOFILE, &full);
      const pid_t made = ::fork();
      ::setrlimit(RLIMIT_NOFILE, &before);
      return made;
    }();
    if (child == 0) {
      std::vector<Fd> own;
      for (int i = 0; i < 64; ++i) own.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      a.reset();
      b.reset();
      for (const Fd& one : own)
        if (::fcntl(one.get(), F_GETFD) < 0) ::_exit(1);
      ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << none_left;
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Processes,
                         testing::ValuesIn(with_rdma({"shm", "tcp", "tcp+aes", "tcp:127.0.0.1,127.0.0.2",
                                                      "ucx:tcp,self"})),
                         [](const auto& backend) { return name_of(backend.param); });

}  // namespace
}  // namespace rejoin::transport
