// Daemons that the system does not give what they need: each ends with an error that says what to raise.
#include <gmock/gmock.h>

#include <algorithm>

#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

using testing::HasSubstr;

std::vector<std::string> with(std::vector<std::string> first, const std::vector<std::string>& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

struct Limits : testing::Test {
  const Scratch scratch;
  const std::string key = scratch.key();
  std::vector<std::string> daemon(const std::vector<std::string>& more) const {
    return with(lone_coordinator({"--job-key-file", key, "--log-directory", scratch.path + "/log", "--socket",
                                  scratch.path + "/socket"}),
                more);
  }
};

TEST_F(Limits, WithoutThreadsANodesDaemonSaysWhatToRaise) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be a user who has no other process";
  const std::string user = std::to_string(50000 + ::getpid() % 10000);
  for (const auto& path : {scratch.path, key})
    ASSERT_EQ(::chown(path.c_str(), static_cast<uid_t>(std::stoul(user)), static_cast<gid_t>(-1)), 0);
  const Ended ended =
      run(with({"/usr/bin/prlimit", "--nproc=1:1", "/usr/bin/setpriv", "--reuid", user, "--clear-groups"},
               daemon({"--transport", "shm"})));
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("the system gives no thread"));
  EXPECT_THAT(ended.output, HasSubstr("raise the limit of processes ('ulimit -u', or pids.max of the container)"));
}

// Whichever descriptor it is that is not there.
TEST_F(Limits, WithoutDescriptorsADaemonSaysWhatToRaise) {
  bool started = false;
  for (int most = 5; most <= 64 && !started; ++most) {
    Process process(with({"/usr/bin/prlimit", "--nofile=" + std::to_string(most) + ":" + std::to_string(most)},
                         daemon({"--transport", "tcp"})),
                    scratch.path + "/out");
    ASSERT_TRUE(eventually([&] {
      siginfo_t ended{};
      ::waitid(P_PID, static_cast<id_t>(process.pid()), &ended, WEXITED | WNOHANG | WNOWAIT);
      started = process.output().find("] ready: ") != std::string::npos;
      return started || ended.si_pid != 0;
    })) << process.output();
    if (!started) {
      const int status = process.wait(std::chrono::seconds(5));
      EXPECT_TRUE(status == 1 || status == 2) << most << " descriptors: " << status << "\n" << process.output();
      EXPECT_THAT(process.output(), HasSubstr("'ulimit -n'")) << most << " descriptors";
    }
    std::filesystem::remove(scratch.path + "/out");
  }
  EXPECT_TRUE(started);
}

TEST_F(Limits, AnAddressFileThatCannotBeLookedAtIsNamedWithItsError) {
  const std::string path = scratch.path + "/" + std::string(300, 'x');
  const Ended ended = run(daemon({"--address-file", path}));
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("--address-file " + path + ": File name too long"));
}

TEST_F(Limits, WithoutProcTransportShmSaysThatItNeedsIt) {
  const std::vector<std::string> without{
      "/usr/bin/unshare", "-m", "/bin/sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"};
  if (run(with(without, {"/bin/true"})).status != 0) GTEST_SKIP() << "nobody may mount here";
  const Ended ended = run(with(without, daemon({"--transport", "shm"})));
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("transport shm needs /proc (/proc/thread-self/fd: No such file or directory): "
                                      "mount it, or use tcp"));
}

}  // namespace
}  // namespace rejoin::test
