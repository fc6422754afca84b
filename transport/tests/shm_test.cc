// Shared memory where process_vm_readv is forbidden, as container runtimes do.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>

#include "base/clock.h"
#include "base/digest.h"
#include "base/fd.h"
#include "base/refusals.h"
#include "base/tests/said_by_child.h"
#include "base/unix_socket.h"
#include "transport/shm/factory.h"
#include "transport/shm/ring.h"
#include "transport/shm/wire.h"
#include "transport/strangers.h"
#include "transport/tests/any_access.h"
#include "transport/tests/forbid_process_vm_readv.h"
#include "transport/tests/within.h"

namespace rejoin::transport::shm {
namespace {

// In a process of its own, which keeps the filter. Returns what `says` returned there.
std::string in_a_container(const std::function<std::string()>& says) {
  return test::said_by_child([&] { return forbid_process_vm_readv() ? says() : "no seccomp here"; });
}

// A megabyte from one engine to the other. Empty: it arrived.
enum class Registered { before_connecting, while_connected };
std::string write_out_of(Mapping from, Registered when = Registered::before_connecting) {
  auto caller = make_engine().value(), listener = make_engine().value();
  auto into = Mapping::shareable(from.size()).value();
  const auto registered = [&] {
    return caller->register_region({from.data(), from.size()}, MemoryKind::host, kAnyAccess).value();
  };
  RegionId source;
  if (when == Registered::before_connecting) source = registered();
  const auto target = listener->register_region({into.data(), into.size()}, MemoryKind::host, kAnyAccess).value();
  std::fill_n(from.data(), from.size(), std::byte{7});
  const auto connected = caller->connect({listener->listen({}).value().text}, {});
  if (!connected) return connected.error().message;
  const auto endpoint = *connected;
  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
  while (SteadyClock().now() < deadline) {
    for (const auto& event : listener->poll())
      if (event.kind == EventKind::written) return into.data()[from.size() - 1] == std::byte{7} ? "" : "other bytes";
    for (const auto& event : caller->poll()) {
      if (event.kind == EventKind::closed) return event.error->message;
      if (event.kind != EventKind::connected) continue;
      if (when == Registered::while_connected) source = registered();
      const Write write{
          .local = {source, 0}, .remote = {listener->remote(target), 0}, .length = from.size(), .notify = 1};
      if (auto posted = caller->write(endpoint, {&write, 1}); !posted) return posted.error().message;
    }
  }
  return "nothing came";
}

TEST(ShmEngine, FilesAreReadWithoutProcessVmReadv) {
  EXPECT_EQ(in_a_container([] { return write_out_of(Mapping::shareable(1 * MiB).value()); }), "");
}

TEST(ShmEngine, MemoryThatIsNoFilesIsRefusedToItsOwnerWithTheReason) {
  for (const auto when : {Registered::before_connecting, Registered::while_connected}) {
    EXPECT_THAT(in_a_container([&] { return write_out_of(Mapping::anonymous(1 * MiB).value(), when); }),
                testing::AllOf(testing::HasSubstr("process_vm_readv allowed by seccomp"),
                               testing::HasSubstr("ptrace_scope at 0 or 1; or use transport tcp")));
    EXPECT_EQ(write_out_of(Mapping::anonymous(1 * MiB).value(), when), "");
  }
}

TEST(ShmEngine, WhoHasChangedItsUserIsToldThatNobodyMayReadIt) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto as_nobody = [](int dumpable) {
    return test::said_by_child([=]() -> std::string {
      if (::setresuid(65534, 65534, 65534) != 0) return "setresuid failed";
      if (::prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0) != 0) return "prctl failed";
      auto listener = make_engine().value();
      const auto listens = listener->listen({});
      return listens ? write_out_of(Mapping::anonymous(1 * MiB).value()) : listens.error().message;
    });
  };
  EXPECT_THAT(as_nobody(0), testing::AllOf(testing::HasSubstr("it has changed its user or group"),
                                           testing::HasSubstr("prctl(PR_SET_DUMPABLE, 1)")));
  EXPECT_EQ(as_nobody(1), "");
}

// Two engines that are connected.
struct Two {
  std::unique_ptr<Engine> caller = make_engine().value(), listener = make_engine().value();
  EndpointId there, here;  // the caller's, and the listener's
  Two() {
    there = caller->connect({listener->listen({}).value().text}, {}).value();
    bool connected = false;
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
      for (const auto& event : listener->poll())
        if (event.kind == EventKind::accepted) here = event.endpoint;
      for (const auto& event : caller->poll()) connected = connected || event.kind == EventKind::connected;
      return connected && here != EndpointId{};
    }));
  }
};

void fill(const Mapping& memory) {
  for (std::size_t i = 0; i < memory.size(); ++i) memory.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
}

TEST(ShmEngine, APeersFileIsSeenInPlaceAndItsOtherMemoryByACopy) {
  for (const bool file : {true, false}) {
    Two two;
    auto memory = file ? Mapping::shareable(1 * MiB).value() : Mapping::anonymous(1 * MiB).value();
    fill(memory);
    const auto region = two.listener->register_region(memory.span(), MemoryKind::host, Access::local).value();
    const auto where = two.listener->viewable(region);
    ASSERT_TRUE(where);
    Bytes room(1000);
    const auto seen = two.caller->view(two.there, *where, 4099, room);
    ASSERT_TRUE(seen) << seen.error().message;
    EXPECT_TRUE(std::ranges::equal(*seen, memory.span().subspan(4099, 1000)));
    EXPECT_EQ(seen->data() != room.data(), file);
    memory.data()[4099] ^= std::byte{1};
    EXPECT_EQ(*seen->data() == memory.data()[4099], file) << "in place is as it is now";
    for (const std::uint64_t outside : {1 * MiB - 999, ~std::uint64_t{0}})
      EXPECT_EQ(two.caller->view(two.there, *where, outside, room).error().code, ErrorCode::invalid_argument);
    auto wrong = *where;  // no memory of the peer's, and beyond the end of its file
    wrong.address = 4096, wrong.file_offset = 1 * MiB;
    EXPECT_FALSE(two.caller->view(two.there, wrong, 0, room));
    two.listener->deregister(region);
    EXPECT_FALSE(two.listener->viewable(region));
    two.caller->close(two.there);
    EXPECT_FALSE(two.caller->view(two.there, *where, 0, room));
  }
}

TEST(ShmEngine, StreamedWritesBringTheSameBytesAtAnyPlaceAndLength) {
  Two two;
  auto from = Mapping::shareable(64 * KiB).value(), into = Mapping::shareable(64 * KiB).value();
  fill(from);
  const auto source = two.caller->register_region(from.span(), MemoryKind::host, Access::local).value();
  const auto target = two.listener->register_region(into.span(), MemoryKind::host, Access::remote_write).value();
  for (const std::size_t at : {0, 1, 63, 64, 1000})
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, 8 * KiB + 1, 8 * KiB + 64, 32 * KiB - 5}) {
      std::ranges::fill(into.span(), std::byte{0xee});
      const Write write{.local = {source, 3},
                        .remote = {two.listener->remote(target), at},
                        .length = length,
                        .notify = 5,
                        .streamed = true,
                        .digested = length % 2 == 0};
      ASSERT_TRUE(two.caller->write(two.there, {&write, 1}));
      bool written = false;
      std::optional<Digested> digested;
      ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
        for (const auto& event : two.listener->poll())
          if (event.kind == EventKind::written && event.value == 5) written = true, digested = event.digested;
        (void)two.caller->poll();
        return written;
      }));
      const auto landed = BytesView(into.span()).subspan(at, length);
      EXPECT_EQ(digested.has_value(), write.digested && length > 8 * KiB) << "few bytes travel in the ring";
      if (digested) EXPECT_EQ(digested->of(landed), digest(landed));
      if (digested) EXPECT_FALSE(digested->of(landed.first(length - 1))) << "a digest is of these bytes and no others";
      EXPECT_TRUE(std::ranges::equal(into.span().subspan(at, length), from.span().subspan(3, length)));
      EXPECT_EQ(into.data()[at + length], std::byte{0xee});
      if (at > 0) EXPECT_EQ(into.data()[at - 1], std::byte{0xee});
    }
}

// The kernel keeps a place for each until it is accepted, though its caller has closed it.
TEST(ShmEngine, AStoppedListenerHoldsUpNobodyWhoCallsAgainAndAgain) {
  const Fd stopped = listen_unix(fmt::format("@rejoin-stopped-{}", ::getpid())).value();
  ASSERT_EQ(::listen(stopped.get(), 20), 0);  // who can wait there
  auto caller = make_engine().value();
  const Address address{fmt::format("shm:@rejoin-stopped-{}", ::getpid())};
  std::optional<Error> refused;
  for (int i = 0; i < 100 && !refused; ++i) {
    const auto endpoint = caller->connect(address, {});
    if (endpoint) caller->close(*endpoint);
    else refused = endpoint.error();
  }
  ASSERT_TRUE(refused) << "there is no end to those who can wait";
  EXPECT_EQ(refused->code, ErrorCode::timeout) << "its process is there, and may go on";
  EXPECT_THAT(refused->message, testing::HasSubstr("too many wait there"));
}

TEST(ShmEngine, AListenerThatDoesNotAnswerIsGivenUp) {
  const Fd silent = listen_unix(fmt::format("@rejoin-silent-{}", ::getpid())).value();
  auto caller = make_engine().value();
  caller->set_silence(std::chrono::milliseconds(20));
  (void)caller->connect({fmt::format("shm:@rejoin-silent-{}", ::getpid())}, {}).value();
  std::optional<Error> end;
  EXPECT_TRUE(within(std::chrono::seconds(5), [&] {
    for (const auto& event : caller->poll())
      if (event.kind == EventKind::closed) end = event.error;
    return end.has_value();
  }));
  ASSERT_TRUE(end);
  EXPECT_EQ(end->code, ErrorCode::timeout);
}

// Nobody tells when there is room again, so it looks; but not all the time.
TEST(ShmEngine, WhoWaitsForRoomSleepsMeanwhile) {
  auto sender = make_engine().value(), stopped = make_engine().value();
  const auto endpoint = sender->connect(stopped->listen({}).value(), {}).value();
  bool connected = false;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)stopped->poll();
    for (const auto& event : sender->poll()) connected |= event.kind == EventKind::connected;
    return connected;
  }));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(sender->send(endpoint, Bytes(60 * KiB)));
  int sleeps = 0, looks = 0;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    ++looks;
    if (!sender->poll().empty() || !sender->arm()) return false;
    pollfd waiting{sender->event_fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&waiting, 1, 10'000), 1) << "it would not see that there is room";
    return ++sleeps == 20;
  }));
  EXPECT_LT(looks, 40);
  int heard = 0;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)sender->poll();
    for (const auto& event : stopped->poll()) heard += event.kind == EventKind::message;
    return heard == 20;
  }));
}

// It has the memory of the channel, and its bell is a pipe that nobody reads any more.
TEST(ShmEngine, APeerWhoseDoorbellIsNoneLosesItsConnectionAlone) {
  const std::string name = fmt::format("@rejoin-bell-{}", ::getpid());
  const Fd listener = listen_unix(name).value();
  auto caller = make_engine().value();
  const auto endpoint = caller->connect({"shm:" + name}, {}).value();
  const Fd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const auto call = receive_with_fds(peer, sizeof(wire::Greeting)).value().value();
  auto channel = Mapping::of(call.fds.at(0), sizeof(Channel)).value();
  auto& rings = *reinterpret_cast<Channel*>(channel.data());
  RingReader(&rings.to_server).announce_sleep(true);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd bell(ends[1]);
  ::close(ends[0]);
  const std::uint64_t word = wire::kMagic;
  const wire::Greeting answer{.probe_address = reinterpret_cast<std::uintptr_t>(&word)};
  ASSERT_TRUE(send_with_fds(peer, bytes_of(answer), {bell.get()}));
  std::optional<Error> end;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : caller->poll()) {
      if (event.kind == EventKind::connected) (void)caller->send(endpoint, as_bytes("ring"));
      if (event.kind == EventKind::closed) end = event.error;
    }
    return end.has_value();
  }));
  ASSERT_TRUE(end);
  EXPECT_EQ(end->code, ErrorCode::corrupt);
}

TEST(UnixSocket, AFileIsItsOwnersAlone) {
  const std::string name = testing::TempDir() + "rejoin-" + std::to_string(::getpid()) + ".socket";
  const mode_t before = ::umask(0);
  const auto listener = listen_unix(name);
  ::umask(before);
  ASSERT_TRUE(listener) << listener.error().message;
  const SocketFile file(name);
  struct stat status {};
  ASSERT_EQ(::stat(name.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST(StrangersOfShm, ProcessesOfOtherUsersAreTurnedAwayAndCounted) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  constexpr int kCalls = 20;
  constexpr uid_t kNobody = 65534;
  auto listener = make_engine().value();
  const Address address = listener->listen({}).value();
  const auto counted = [] { return refusals::counted()[static_cast<std::size_t>(refusals::Why::user)]; };
  const auto before = counted();
  const pid_t child = ::fork();
  if (child == 0) {
    bool called = ::setuid(kNobody) == 0;
    for (int i = 0; i < kCalls; ++i) called = called && connect_unix(address.text.substr(4)).has_value();
    ::_exit(called ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    EXPECT_TRUE(listener->poll().empty());
    return counted() == before + kCalls;
  }));
}

// Processes of this user that greet nobody: few at a time, and not for long; who greets comes in.
TEST(StrangersOfShm, HaveTheirTimeAndNoMoreAndKeepNobodyOut) {
  auto listener = make_engine().value(), caller = make_engine().value();
  listener->set_silence(std::chrono::milliseconds(200));
  const Address address = listener->listen({}).value();
  std::vector<Fd> silent;
  for (std::size_t i = 0; i < Strangers::kMost + 20; ++i) {
    silent.push_back(connect_unix(address.text.substr(4)).value());
    (void)listener->poll();
  }
  const auto gone = [&] {
    return std::count_if(silent.begin(), silent.end(), [](const Fd& socket) {
      char byte;
      return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
    });
  };
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] { return (void)listener->poll(), gone() >= 20; }));
  ASSERT_TRUE(caller->connect(address, as_bytes("hello")));
  bool accepted = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)caller->poll();
    for (const auto& event : listener->poll()) accepted = accepted || event.kind == EventKind::accepted;
    return accepted;
  }));
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)listener->poll();
    return gone() == static_cast<std::ptrdiff_t>(silent.size());
  }));
}

TEST(StrangersOfShm, WithoutDescriptorsAListenerWaitsAndDoesNotSpin) {
#if defined(__clang__) && defined(__has_feature)
#if __has_feature(undefined_behavior_sanitizer)
  GTEST_SKIP() << "UBSan looks at objects through a pipe, and calls them damaged where it gets none";
#endif
#endif
  auto listener = make_engine().value(), caller = make_engine().value();
  const Address address = listener->listen({}).value();
  ASSERT_TRUE(caller->connect(address, as_bytes("hello")));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  testing::internal::CaptureStdout();
  const int lowest = Fd(::dup(0)).get();
  const rlimit none{static_cast<rlim_t>(lowest), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)listener->poll();
    fd_set ready;
    FD_ZERO(&ready);
    FD_SET(listener->event_fd(), &ready);
    timeval at_once{};
    return ::select(listener->event_fd() + 1, &ready, nullptr, nullptr, &at_once) == 0;
  }));
  const auto enough = std::chrono::steady_clock::now() + 3 * kWithoutDescriptors;
  while (std::chrono::steady_clock::now() < enough) (void)listener->poll();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  const std::string said = testing::internal::GetCapturedStdout(), line = "no data connection can be accepted";
  EXPECT_NE(said.find(line), said.npos) << said;
  EXPECT_EQ(said.find(line), said.rfind(line)) << "it tries again and again, and says so seldom";
  bool accepted = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)caller->poll();
    for (const auto& event : listener->poll()) accepted = accepted || event.kind == EventKind::accepted;
    return accepted;
  }));
}

}  // namespace
}  // namespace rejoin::transport::shm
