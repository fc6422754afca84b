// Shared memory with a process whose first thread, by whose number it goes, has ended.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/fd.h"
#include "transport/shm/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/within.h"

namespace rejoin::transport::shm {
namespace {

constexpr std::size_t kSize = 64 * KiB;

bool first_thread_has_ended() {
  const int own = 1;
  int seen = 0;
  const iovec local{&seen, sizeof seen}, remote{const_cast<int*>(&own), sizeof own};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) < 0;
}

enum class Ends { before_connecting, when_connected };

// Calls `where`, learns the target from its first message, and writes `from` there once its first thread has ended.
void call_and_write(const std::string& where, const Mapping& from, Ends ends) {
  const auto engine = make_engine().value();
  std::fill_n(from.data(), kSize, std::byte{7});
  const auto source = engine->register_region(from.span(), MemoryKind::host, kAnyAccess).value();
  const auto ended = [] { return within(std::chrono::seconds(20), first_thread_has_ended); };
  if (ends == Ends::before_connecting && !ended()) return;
  const auto endpoint = engine->connect({where}, {});
  if (!endpoint) return (void)fmt::print(stderr, "{}\n", endpoint.error().message);
  for (RemoteRegion target;;)
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::closed) return (void)fmt::print(stderr, "{}\n", event.error->message);
      if (event.kind != EventKind::message || !ended()) continue;
      std::memcpy(&target, event.message.data(), sizeof target);
      const Write write{.local = {source, 0}, .remote = {target, 0}, .length = kSize, .notify = 1};
      if (!engine->write(*endpoint, {&write, 1})) return;
    }
}

struct Threads : testing::TestWithParam<std::tuple<bool, Ends>> {};

TEST_P(Threads, APeerWhoseFirstThreadHasEndedConnectsAndIsRead) {
  const auto [file, ends] = GetParam();
  const auto engine = make_engine().value();
  const std::string where = engine->listen({}).value().text;
  const auto into = Mapping::shareable(kSize).value();
  const auto target = engine->register_region(into.span(), MemoryKind::host, kAnyAccess).value();
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([&, file = file, ends = ends] {
      call_and_write(where, file ? Mapping::shareable(kSize).value() : Mapping::anonymous(kSize).value(), ends);
      ::_exit(1);
    }).detach();
    ::syscall(SYS_exit, 0);  // of this thread alone, as pthread_exit() at the end of main
  }
  bool written = false, closed = false;
  EXPECT_TRUE(within(std::chrono::seconds(30), [&] {
    for (const auto& event : engine->poll()) {
      written = written || event.kind == EventKind::written;
      closed = closed || event.kind == EventKind::closed;
      const RemoteRegion remote = engine->remote(target);
      if (event.kind == EventKind::accepted) (void)engine->send(event.endpoint, bytes_of(remote));
    }
    return written || closed || ::waitpid(child, nullptr, WNOHANG) != 0;
  }));
  EXPECT_TRUE(written);
  EXPECT_EQ(into.data()[kSize - 1], std::byte{7});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

INSTANTIATE_TEST_SUITE_P(Shm, Threads,
                         testing::Combine(testing::Bool(),
                                          testing::Values(Ends::before_connecting, Ends::when_connected)));

}  // namespace
}  // namespace rejoin::transport::shm
