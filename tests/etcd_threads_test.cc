// A coordinator on etcd that the system gives no threads: gRPC, which speaks with etcd, has a dozen.
#include <gmock/gmock.h>

#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

using testing::HasSubstr;

struct EtcdThreads : testing::Test {
  const uid_t user = static_cast<uid_t>(50000 + ::getpid() % 10000);
  Job job;
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be a user who has no other process";
    for (const auto& path : {job.scratch.path, job.key})
      ASSERT_EQ(::chown(path.c_str(), user, static_cast<gid_t>(-1)), 0);
  }
};

TEST_F(EtcdThreads, AreAskedForAtTheStart) {
  auto command = lone_coordinator({"--name", "c0", "--store", "etcd:127.0.0.1:1", "--job", "j", "--job-key-file",
                                   job.key, "--log-directory", job.file("log")});
  command.insert(command.begin(), {"/usr/bin/prlimit", "--nproc=8:8", "/usr/bin/setpriv", "--reuid",
                                   std::to_string(user), "--clear-groups"});
  const Ended ended = run(command);
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("gRPC, which speaks with etcd, needs 12 threads: the system gives no thread"));
  EXPECT_THAT(ended.output, HasSubstr("raise the limit of processes ('ulimit -u', or pids.max of the container)"));
}

}  // namespace
}  // namespace rejoin::test
