// gRPC without threads: calls that are cancelled do not come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <asio/io_context.hpp>
#include <cstdio>

#include "daemon/etcd_client.h"
#include "tests/process.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;

// In a process of a user who has no other: see below.
TEST(EtcdThreads, DISABLED_Alone) {
  asio::io_context io(1);
  auto client = EtcdClient::create(io, {.endpoints = {"127.0.0.1:1"}, .deadline = std::chrono::milliseconds(100)});
  ASSERT_TRUE(client) << client.error().message;
  const rlimit none{.rlim_cur = 1, .rlim_max = 1};
  ASSERT_EQ(::setrlimit(RLIMIT_NPROC, &none), 0);
  std::string error;
  (*client)->transact({}, [&](Result<etcd::TxnResponse> answer) { error = answer ? "none" : answer.error().message; });
  while (error.empty() && !(*client)->overdue()) io.run_one();
  if (const auto overdue = (*client)->overdue()) std::printf("meanwhile: %s\n", overdue->why.c_str());
  io.run();
  std::printf("error: %s\n", error.c_str());
  client->reset();
  std::printf("the client is gone\n");
}

TEST(EtcdThreads, ThatAreNotThereMakeATryFailAndHoldNobodyUp) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be a user who has no other process";
  const auto ended = test::run(
      {"/usr/bin/setpriv", "--reuid", std::to_string(50000 + ::getpid() % 10000), "--clear-groups",
       test::binaries() + "/etcd_store_test", "--gtest_also_run_disabled_tests",
       "--gtest_filter=EtcdThreads.DISABLED_Alone"},
      {"ASAN_OPTIONS=detect_leaks=0:intercept_tls_get_addr=0"});  // LeakSanitizer looks in a thread of its own
  EXPECT_EQ(ended.status, 0) << ended.output;
  for (const char* when : {"meanwhile", "error"})
    EXPECT_THAT(ended.output, HasSubstr(std::string(when) +
                                        ": etcd at 127.0.0.1:1: gRPC, which speaks with etcd, does not even let go of "
                                        "a call that was cancelled: it may lack threads, or memory. Raise the limit"));
  EXPECT_THAT(ended.output, HasSubstr("the client is gone"));
}

}  // namespace
}  // namespace rejoin::daemon
