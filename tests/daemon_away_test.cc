// Trainers whose daemon is away for a while.
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

// The machine was frozen while the daemon was exchanged, say. It is there when the trainer goes on, and that looks.
TEST(Session, ATrainerThatWasStoppedWhileItsDaemonWasAwayRegistersWithTheNextOne) {
  Job job;
  job.start(1, 0);
  auto environment = job.environment(0);
  environment.emplace_back("REJOIN_PATIENCE_MS=1500");
  Process trainer({kMinimal}, job.file("a"), environment);
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  const auto heard = [&](const char* what) { return trainer.output().find(what) != std::string::npos; };
  ::kill(job.processes[1]->pid(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return heard("the daemon is gone"); }));
  ::kill(trainer.pid(), SIGSTOP);
  const auto stopped_at = std::chrono::steady_clock::now();
  job.processes[1] = nullptr;
  job.processes[1] = job.start_node(0, {"--connect", job.coordinator});
  EXPECT_TRUE(eventually([&] { return std::chrono::steady_clock::now() - stopped_at > std::chrono::seconds(4); }));
  const int then = committed();
  ::kill(trainer.pid(), SIGCONT);
  EXPECT_TRUE(eventually([&] { return heard("registered again with the daemon"); })) << trainer.output();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; })) << trainer.output();
}

}  // namespace
}  // namespace rejoin::test
