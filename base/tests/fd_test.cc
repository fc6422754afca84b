// Standard descriptors that are closed.
#include "base/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace rejoin {
namespace {

// As of a daemon in a chroot: the next socket would have number 2, and get what the log says.
TEST(StandardDescriptors, AreTakenWhereThereIsNoDevNull) {
  constexpr int kMayNot = 77;
  std::string root = "/tmp/rejoin-root-XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::chroot(root.c_str()) != 0 && (::unshare(CLONE_NEWUSER) != 0 || ::chroot(root.c_str()) != 0)) ::_exit(kMayNot);
    if (::chdir("/") != 0) ::_exit(1);
    for (const int fd : {0, 1, 2}) ::close(fd);
    open_standard_descriptors();
    char byte = 'x';
    bool right = true;
    for (const int fd : {0, 1, 2})
      right = right && ::fcntl(fd, F_GETFD) == 0 && ::write(fd, &byte, 1) < 0 && ::read(fd, &byte, 1) < 0;
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::rmdir(root.c_str());
  if (WIFEXITED(status) && WEXITSTATUS(status) == kMayNot) GTEST_SKIP() << "only root can have another root directory";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace rejoin
