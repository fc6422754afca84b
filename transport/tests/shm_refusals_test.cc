// Who is refused over shared memory is told why, as long as both ends are of a release that does so.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/fd.h"
#include "base/unix_socket.h"
#include "transport/shm/factory.h"
#include "transport/shm/peer_process.h"
#include "transport/shm/ring.h"
#include "transport/shm/wire.h"
#include "transport/tests/any_access.h"
#include "transport/tests/forbid_process_vm_readv.h"
#include "transport/tests/within.h"

namespace rejoin::transport::shm {
namespace {

using testing::HasSubstr, testing::Not;

// How a caller's connection ends.
std::string end_of(Engine& caller) {
  std::string end;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : caller.poll())
      if (event.kind == EventKind::closed) end = event.error->message;
    return !end.empty();
  }));
  return end;
}

TEST(ShmRefusals, ACallerThatTheListenerMayNotReadHearsItsReasonAndTheRemedy) {
  enum class Filter { unknown, here, none };
  std::atomic<Filter> filter = Filter::unknown;
  std::atomic<bool> done = false;
  auto listener = make_engine().value(), caller = make_engine().value();
  auto memory = Mapping::anonymous(4 * KiB).value();  // no file's, so that it would have to be read
  ASSERT_TRUE(caller->register_region(memory.span(), MemoryKind::host, kAnyAccess));
  ASSERT_TRUE(caller->connect(listener->listen({}).value(), {}));
  std::thread other([&] {
    filter = forbid_process_vm_readv() ? Filter::here : Filter::none;
    filter.notify_all();
    while (!done) (void)listener->poll();
  });
  filter.wait(Filter::unknown);
  const std::string end = filter == Filter::here ? end_of(*caller) : std::string();
  done = true;
  other.join();
  if (filter == Filter::none) GTEST_SKIP() << "no seccomp here";
  EXPECT_THAT(end, HasSubstr("it has refused this connection"));
  EXPECT_THAT(end, HasSubstr(fmt::format("the memory of process {} (both must run as one user in one PID namespace",
                                         ::getpid())));
  EXPECT_THAT(end, HasSubstr("or use transport tcp"));
}

// An older caller looks at its socket alone.
TEST(ShmRefusals, TheReasonLiesInTheRingAndTheSocketOnlyCloses) {
  auto listener = make_engine().value();
  const Fd caller = connect_unix(listener->listen({}).value().text.substr(4)).value();
  const Fd memory = make_sealed_memfd("channel", sizeof(Channel)).value(), bell = make_eventfd().value();
  const auto channel = Mapping::of(memory, sizeof(Channel)).value();
  const wire::Greeting unmapped{.probe_address = 8, .private_memory = 1};
  ASSERT_TRUE(send_with_fds(caller, bytes_of(unmapped), {memory.get(), bell.get()}));
  char byte = 0;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    EXPECT_TRUE(listener->poll().empty());
    return ::recv(caller.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }));
  const auto record = RingReader(&reinterpret_cast<Channel*>(channel.data())->to_client).front();
  ASSERT_TRUE(record);
  wire::Header header;
  BytesView text = *record;
  ASSERT_TRUE(take(text, header));
  EXPECT_EQ(header.kind, wire::Kind::refused);
  EXPECT_THAT(std::string(as_text(text)), HasSubstr("it is not mapped there"));
  EXPECT_THAT(std::string(as_text(text)), Not(HasSubstr("PID namespace"))) << "that would be no remedy";
}

// What a listener of another release, or none of ours, leaves behind when it closes.
TEST(ShmRefusals, WhatIsTakenForAReasonIsOneLineThatPrintsAndNothingElseIs) {
  const std::string name = fmt::format("@rejoin-refuses-{}", ::getpid());
  const Fd listener = listen_unix(name).value();
  const auto end_where = [&](auto leaves) {
    auto caller = make_engine().value();
    EXPECT_TRUE(caller->connect({"shm:" + name}, {}));
    {
      const Fd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const auto call = receive_with_fds(peer, sizeof(wire::Greeting)).value().value();
      const auto channel = Mapping::of(call.fds.at(0), sizeof(Channel)).value();
      leaves(reinterpret_cast<Channel*>(channel.data())->to_client);
    }
    return end_of(*caller);
  };
  const auto record = [](wire::Kind kind, const std::string& text) {
    return [=](Ring& ring) {
      EXPECT_TRUE(RingWriter(&ring).append(bytes_of(wire::Header{.kind = kind}), as_bytes(text)));
    };
  };
  const std::string closed = "the peer is gone: the peer closed the connection";
  EXPECT_EQ(end_where([](Ring&) {}), closed);
  EXPECT_EQ(end_where(record(wire::Kind::message, "a message")), closed);
  EXPECT_EQ(end_where([](Ring& ring) { ring.written = 4; }), closed);
  EXPECT_EQ(end_where(record(wire::Kind::refused, "no\n\xff")),
            "the peer is gone: it has refused this connection: no??");
  EXPECT_LT(end_where(record(wire::Kind::refused, std::string(20 * KiB, 'x'))).size(), 2 * KiB);
}

TEST(ShmRefusals, AProcessWithoutANumberHereIsOfAnotherPidNamespace) {
  Bytes word(8);
  const auto read = PeerProcess(0).read(4096, word);
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, HasSubstr("the memory of a process of another PID namespace (both must run"));
}

TEST(ShmRefusals, AProcessThatHasEndedIsSaidToHaveEnded) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  Bytes word(8);
  const auto read = PeerProcess(child).read(4096, word);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().message, fmt::format("process {} has ended", child));
}

// Of all connections over unix sockets in this process, as those of a process that ends.
void hang_up_everywhere() {
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.ss_family == AF_UNIX)
      (void)::shutdown(fd, SHUT_RDWR);
  }
}

// Its number may be another's by then; a file is known by more than a number.
TEST(ShmRefusals, WhatIsReadOutOfAProcessBehindItsHangUpIsNotToldOf) {
  for (const bool file : {false, true}) {
    auto caller = make_engine().value(), listener = make_engine().value();
    const auto from = (file ? Mapping::shareable(1 * MiB) : Mapping::anonymous(1 * MiB)).value();
    const auto into = Mapping::anonymous(1 * MiB).value();
    const auto source = caller->register_region(from.span(), MemoryKind::host, kAnyAccess).value();
    const auto target = listener->register_region(into.span(), MemoryKind::host, kAnyAccess).value();
    const auto there = caller->connect(listener->listen({}).value(), {}).value();
    bool connected = false, accepted = false, written = false, closed = false;
    const auto poll_listener = [&] {
      for (const auto& event : listener->poll()) {
        accepted |= event.kind == EventKind::accepted;
        written |= event.kind == EventKind::written;
        closed |= event.kind == EventKind::closed;
      }
    };
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
      poll_listener();
      for (const auto& event : caller->poll()) connected |= event.kind == EventKind::connected;
      return connected && accepted;
    }));
    const Write write{.local = {source, 0}, .remote = {listener->remote(target), 0}, .length = 1 * MiB, .notify = 1};
    ASSERT_TRUE(caller->write(there, {&write, 1}));
    hang_up_everywhere();
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] { return poll_listener(), closed; }));
    EXPECT_EQ(written, file);
  }
}

// To open it would wait for a writer.
TEST(ShmRefusals, AFileWhoseNumberIsANamedPipeByNowHoldsUpNobody) {
  const std::string path = testing::TempDir() + fmt::format("rejoin-pipe-{}", ::getpid());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const Fd pipe(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ::unlink(path.c_str());
  ASSERT_TRUE(pipe);
  struct stat status {};
  ASSERT_EQ(::fstat(PeerProcess(::getpid()).open_file(pipe.get()).get(), &status), 0);
  EXPECT_TRUE(S_ISFIFO(status.st_mode));
}

}  // namespace
}  // namespace rejoin::transport::shm
