// `rejoin doctor` in what a container gives to it: limits, filters of system calls, namespaces.
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstddef>

#include "tests/doctor_support.h"

namespace rejoin::test {
namespace {

using Doctor = DoctorTest;

// As the default profile of a container runtime may do it.
bool forbid_looking_at_processes() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(filter), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_F(Doctor, FindsThatProcessesMayNotBeLookedAt) {
  job.start(1, 0);
  const auto ended = examine_after(forbid_looking_at_processes, {"--strict", "--socket", job.socket(0)});
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_NE(ended.output.find("WARN  socket: process_vm_readv is refused"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("-> allow pidfd_open"), std::string::npos) << ended.output;
}

TEST_F(Doctor, FindsADaemonOfAnotherPidNamespace) {
  if (::geteuid() != 0) GTEST_SKIP() << "PID namespaces need root";
  const auto decides = job.start_coordinator({"--replicas", "1", "--ranks", "1"});
  const Process contained(
      {"/usr/bin/unshare", "--pid", "--fork", "--kill-child", kDaemon, "--job-key-file", job.key, "--socket",
       job.socket(0), "--connect", job.coordinator, "--address-file", job.file("node.json")},
      job.file("node.out"));
  if (!eventually([&] { return std::filesystem::exists(job.file("node.json")); }, std::chrono::seconds(5)))
    GTEST_SKIP() << "no PID namespace: " << contained.output();
  expect(2, {"--socket", job.socket(0)}, {"FAIL", "socket:", "of another PID namespace", "-> let both share one"});
  expect(0, {"--socket", job.socket(0), "--transport", "tcp"}, {"WARN", "socket:", "of another PID namespace"});
}

// What has CAP_IPC_LOCK may lock anything, and so the program is started without.
TEST_F(Doctor, FindsThatMemoryCannotBeLocked) {
  const auto without = [] {
    const rlimit little{1 << 20, 1 << 20};
    return ::setrlimit(RLIMIT_MEMLOCK, &little) == 0 &&
           (::geteuid() != 0 || ::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0);
  };
  const auto ended = examine_after(without, {"--transport", "ibverbs"});
  EXPECT_EQ(ended.status, 2) << ended.output;
  EXPECT_NE(ended.output.find("FAIL  memlock: the limit is 1.0 MiB"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("LimitMEMLOCK=infinity"), std::string::npos) << ended.output;
}

}  // namespace
}  // namespace rejoin::test
