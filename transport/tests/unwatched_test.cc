// Where the kernel watches no more descriptors for this user (fs.epoll.max_user_watches).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <iterator>

#include "base/tests/said_by_child.h"
#include "transport/factory.h"
#include "transport/tests/calling_pair.h"

namespace rejoin::transport {
namespace {

// To the calling thread, for as long as it lives. False: this kernel has no filters.
bool let_nothing_be_watched() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_epoll_ctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, EPOLL_CTL_ADD, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSPC),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(filter), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// One calls before that, and one after.
TEST(Unwatched, AConnectionThatTheKernelDoesNotWatchEndsAndItsProcessGoesOn) {
  for (const std::string transport : {"tcp", "tcp+aes", "shm"}) {
    const std::string said = test::said_by_child([&]() -> std::string {
      CallingPair pair;
      pair.a = make_engine(transport).value();
      pair.b = make_engine(transport).value();
      const auto address = pair.b->listen({"127.0.0.1:0"}).value();
      pair.of_a = pair.a->connect(address, {}).value();
      if (!let_nothing_be_watched()) return "no seccomp here";
      if (!pair.until([&] { return pair.end.has_value(); })) return "its caller was not told";
      const auto second = pair.a->connect(address, {});
      return second ? "nobody says why" : second.error().message;
    });
    EXPECT_THAT(said, testing::HasSubstr("raise the sysctl fs.epoll.max_user_watches")) << transport;
  }
}

}  // namespace
}  // namespace rejoin::transport
