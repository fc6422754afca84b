// Trainers and their daemons: who comes, comes too late, comes twice, is stopped, dies, or ends in order.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <sstream>

#include "rejoin/session.h"
#include "tests/daemon_support.h"
#include "tests/session_config.h"

namespace rejoin::test {
namespace {

// One trainer's session, on a weight of 1000 elements; a step adds its number.
std::unique_ptr<Session> small_session(const Job& job, std::uint32_t replica) {
  auto config = config_of(job, replica);
  auto session = *Session::open(config);
  const TensorId w = *session->add({.name = "w", .count = 1000});
  (void)*session->bucket({w});
  if (!session->allocate()) return nullptr;
  return session->join() ? std::move(session) : nullptr;
}

Result<> commit(Session& session) {
  return session.commit([&](const Update& update) {
    const auto w = Session::as<float>(*session.weight(update.tensor));
    for (std::uint64_t i = update.first; i < update.first + update.count; ++i) w[i] += static_cast<float>(update.step);
  });
}

// The only contributor dies in a step in which a joiner has caught up: nobody else holds the state, and nothing is
// lost.
TEST(Session, AJoinerThatHasCaughtUpTakesOverTheStepWhoseLastContributorDies) {
  Job job;
  job.silence_ms = "10000";  // however long a crowded machine takes
  job.start(2, 0);
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t first = ::fork();  // it computes each step until it may go on
  if (first == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto session = small_session(job, 0);
    char may = 0;
    for (auto step = session->begin_step(); step && *step; step = session->begin_step())
      if (::read(go[0], &may, 1) != 1 || !session->all_reduce(0) || !commit(*session)) break;
    ::_exit(1);
  }
  std::uint64_t committed = 0;
  const auto let_it_commit = [&] {
    EXPECT_EQ(::write(go[1], "x", 1), 1);
    ++committed;
    EXPECT_TRUE(eventually([&] { return job.status().at("committed") == committed; })) << job.status().dump();
  };
  auto second = small_session(job, 1);
  ASSERT_NE(second, nullptr);
  ASSERT_TRUE(*second->begin_step());
  second.reset();
  second = small_session(job, 1);  // its next instance
  ASSERT_NE(second, nullptr);
  while (!HasFailure() && job.status().at("members").size() < 2) let_it_commit();
  // As a joiner, until it has to contribute.
  std::atomic<std::uint64_t> joined_at = 0;
  auto joining = std::async(std::launch::async, [&] {
    for (;;) {
      auto step = second->begin_step();
      if (!step || !*step || (*step)->contributes()) return step;
      joined_at = (*step)->number();
      EXPECT_EQ(second->position().error().code, ErrorCode::unavailable) << "its state is of no one step";
      if (!commit(*second)) return step;
    }
  });
  // What has arrived is verified at once, or where its source was a step ahead with the next commit.
  const auto caught_up = [&] { return job.status().at("registered").at(1).at("caught_up") == true; };
  while (!HasFailure() && !eventually(caught_up, std::chrono::seconds(2))) let_it_commit();
  ASSERT_EQ(job.status().at("members").at(1).at("role"), "catching_up");
  ASSERT_TRUE(eventually([&] { return joined_at == committed + 1; })) << "it has begun the step as a joiner";
  const std::string source = job.addresses("node0").at("status");
  const auto serving = [&] {
    const Ended told = run({kCli, "status", "--json", source});
    return nlohmann::json::parse(told.output).at("node_role").at("serving").size();
  };
  EXPECT_TRUE(eventually([&] { return serving() == 1; }));
  ::kill(first, SIGKILL);
  ::waitpid(first, nullptr, 0);
  const auto step = joining.get();
  ASSERT_TRUE(step && *step);
  EXPECT_TRUE((*step)->contributes());
  EXPECT_TRUE(eventually([&] { return serving() == 0; })) << "nobody is served any more, and the status says so";
  EXPECT_EQ((*step)->number(), committed + 1);
  EXPECT_EQ(second->version(), committed) << "and updated nothing";
  const auto position = second->position();
  ASSERT_TRUE(position) << position.error().message;
  EXPECT_EQ(position->step(), committed);
  EXPECT_FALSE((*step)->batch().empty());
  ASSERT_TRUE(second->all_reduce(0));
  ASSERT_TRUE(commit(*second));
  EXPECT_EQ(second->version(), committed + 1);
  for (const float w : Session::as<float>(*second->weight({0})))
    ASSERT_EQ(w, static_cast<float>((committed + 1) * (committed + 2) / 2)) << "the sum of all steps' numbers";
  EXPECT_EQ(job.status().at("steps_rolled_back"), 0);
}

// More descriptors than go in one message, and more names than one holds.
TEST(Session, AStateOfManyTensorsInManyAllocationsIsServed) {
  Job job;
  job.start(1, 3);
  const auto config = config_of(job, 0);
  std::vector<Mapping> memory;  // outlives the session
  auto session = *Session::open(config);
  std::vector<TensorId> ids;
  for (int i = 0; i < 4000; ++i) {
    const TensorSpec spec{.name = fmt::format("{:0>150}", i), .count = 64, .moments = 1};
    if (i < 300) memory.push_back(*Mapping::shareable(512));
    const auto id = i < 300 ? session->add(spec, {memory.back().span().first(256), memory.back().span().subspan(256)})
                            : session->add(spec);
    ASSERT_TRUE(id) << id.error().message;
    ids.push_back(*id);
  }
  ASSERT_TRUE(session->bucket(ids));
  ASSERT_TRUE(session->allocate());
  EXPECT_EQ(session->moment(ids[7], 0)->data(), memory[7].data() + 256);
  if (auto joined = session->join(); !joined) FAIL() << joined.error().message;
  std::uint64_t steps = 0, updates = 0;
  for (auto step = session->begin_step(); step && *step; step = session->begin_step(), ++steps) {
    ASSERT_TRUE(session->all_reduce(0));
    const auto refused = session->commit([&](const Update&) { ++updates; }, CudaStream{});
    ASSERT_FALSE(refused) << "its state is the host's";
    EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument) << "and nothing is changed by that";
    ASSERT_TRUE(session->commit([&](const Update&) { ++updates; }));
  }
  EXPECT_EQ(steps, 3u);
  EXPECT_EQ(updates, 3 * ids.size());
  EXPECT_EQ(run({kCli, "status", job.coordinator_status}).status, 0);
}

// It gets what those get that the end has met: no step.
TEST(Session, ATrainerThatComesAfterTheEndHearsThatItIsOver) {
  Job job;
  job.start(1, 5);
  const Ended first = run({kMinimal}, job.environment(0), std::chrono::seconds(30));
  ASSERT_EQ(first.status, 0) << first.output;
  const auto comes_late = [&] {
    const Ended late = run({kMinimal}, job.environment(0), std::chrono::seconds(30));
    EXPECT_EQ(late.status, 0) << late.output;
    EXPECT_NE(late.output.find("the job was finished with step 5 before"), std::string::npos) << late.output;
    const std::string status = run({kCli, "status", job.coordinator_status}).output;
    EXPECT_NE(status.find("finished"), std::string::npos) << status;
    EXPECT_EQ(status.find("waits for"), std::string::npos) << status;
    EXPECT_EQ(job.status().at("blocked_on").size(), 0u);
  };
  comes_late();
  job.processes[0] = nullptr;
  job.processes[0] = job.start_coordinator({"--replicas", "1", "--ranks", "1", "--batch", "8", "--steps", "5",
                                            "--listen", job.coordinator, "--status", job.coordinator_status});
  comes_late();
}

// Whether it has a warning, but for those of a busy machine, on which a daemon may not run for a while.
bool warned(const std::string& log) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);)
    if (line.find("warn") != std::string::npos && line.find(" was paused for ") == std::string::npos) return true;
  return false;
}

TEST(Session, AnOrderlyEndIsNoWarning) {
  Job job;
  job.start(2, 20);
  {
    Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
    ASSERT_EQ(first.wait(std::chrono::seconds(30)), 0) << first.output();
    ASSERT_EQ(second.wait(std::chrono::seconds(30)), 0) << second.output();
    EXPECT_EQ(first.output().find("warning"), std::string::npos) << first.output();
  }
  const auto log = [&](const char* name) { return read_file(job.file(std::string(name) + ".out")); };
  EXPECT_TRUE(eventually([&] {
    return log("node0").find("replica 0 rank 0 has left: the job is finished") != std::string::npos &&
           log("coordinator").find("replica 1 has left the finished job") != std::string::npos;
  })) << log("node0")
      << log("coordinator");
  ASSERT_EQ(::kill(job.processes[0]->pid(), SIGTERM), 0);
  EXPECT_EQ(job.processes[0]->wait(std::chrono::seconds(15)), 0);
  EXPECT_TRUE(eventually([&] { return log("node1").find("; the job is finished") != std::string::npos; }))
      << log("node1");
  for (const char* name : {"coordinator", "node0", "node1"}) EXPECT_FALSE(warned(log(name))) << log(name);
}

TEST(Session, ATrainerThatWasStoppedSaysForHowLongAndThatItWasPutOut) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  ::kill(second.pid(), SIGSTOP);
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  const int then = committed();
  ASSERT_TRUE(eventually([&] { return committed() > then + 5; }));
  ::kill(second.pid(), SIGCONT);
  EXPECT_EQ(second.wait(std::chrono::seconds(15)), 3) << second.output();
  EXPECT_NE(second.output().find(
                " s, so the daemon put it out (its process gave no sign of life for 1000 ms); it registers again"),
            std::string::npos)
      << second.output();
  EXPECT_NE(second.output().find(" s, and its replica was put out of the job: "), std::string::npos) << second.output();
  EXPECT_EQ(second.output().find("the daemon is gone"), std::string::npos) << second.output();
}

// Its node may be in order otherwise: the trainer does not wait for ever, and the others go on meanwhile.
TEST(Session, ATrainerWhoseDaemonIsStoppedEndsWithinItsPatience) {
  Job job;
  job.start(2, 0);
  auto environment = job.environment(1);
  environment.emplace_back("REJOIN_PATIENCE_MS=1500");
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), environment);
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  const pid_t daemon = job.processes[2]->pid();  // replica 1's
  ::kill(daemon, SIGSTOP);
  EXPECT_EQ(second.wait(std::chrono::seconds(15)), 1) << second.output();
  EXPECT_NE(second.output().find("has not given a sign of life for "), std::string::npos) << second.output();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  ::kill(daemon, SIGCONT);
}

// By whoever cleans /tmp: trainers that are there go on, and one that starts again finds it.
TEST(Session, ASocketThatIsRemovedIsMadeAgain) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
  const auto committed = [&] { return job.status().value("committed", 0); };
  const auto members = [&] { return job.status().at("members").size(); };
  ASSERT_TRUE(eventually([&] { return committed() > 5 && members() == 2; }));
  std::filesystem::remove(job.socket(1));
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(job.socket(1)); }));
  const int then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; }));
  EXPECT_EQ(members(), 2u) << "the trainer that is there goes on";
  ::kill(second.pid(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return members() == 1; }));
  Process again({kMinimal}, job.file("c"), job.environment(1));
  EXPECT_TRUE(eventually([&] { return members() == 2; })) << again.output();
}

// Of two trainers with the same replica and rank the first stays, at one daemon and at two.
TEST(Session, ASecondTrainerForAPlaceIsRefusedAndTheFirstGoesOn) {
  Job job;
  job.start(2, 0);
  auto first = std::make_unique<Process>(std::vector{kMinimal}, job.file("a"), job.environment(0));
  Process other({kMinimal}, job.file("b"), job.environment(1));
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  const auto epoch = job.status().at("epoch");
  for (const std::uint32_t node : {0u, 1u}) {
    const Ended second = run({kMinimal}, {"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(node)},
                             std::chrono::seconds(15));
    EXPECT_NE(second.status, 0) << second.output;
    const auto who = node == 0 ? fmt::format("process {} of this node, node0, is replica 0 rank 0", first->pid())
                               : fmt::format("process {} on node node0 is replica 0 rank 0", first->pid());
    EXPECT_NE(second.output.find(who), std::string::npos) << second.output;
  }
  const int then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; }));
  EXPECT_EQ(job.status().at("epoch"), epoch) << first->output();
  // The next one after a kill is taken at once, at either daemon.
  for (const std::uint32_t node : {1u, 0u}) {
    first.reset();
    first = std::make_unique<Process>(
        std::vector{kMinimal}, job.file("again" + std::to_string(node)),
        std::vector<std::string>{"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(node)});
    EXPECT_TRUE(eventually([&] {
      const auto members = job.status().at("members");
      return members.size() == 2 && members[0].at("role") == members[1].at("role");
    })) << first->output()
        << job.status().dump();
  }
}

// A daemon in a container of its own: the kernel has no number for its trainers there.
TEST(Trainer, OfAnotherPidNamespaceTakesPartAndTheDaemonSaysWhatThatCosts) {
  if (::geteuid() != 0) GTEST_SKIP() << "a PID namespace needs root";
  Job job;
  job.silence_ms = "20000";  // its end shows by its socket, long before
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8"});
  std::vector<std::unique_ptr<Process>> daemons;
  for (std::uint32_t node = 0; node < 2; ++node) {
    const std::string name = "node" + std::to_string(node);
    daemons.push_back(std::make_unique<Process>(
        std::vector<std::string>{"/usr/bin/unshare", "--pid", "--fork", "--kill-child", kDaemon, "--job-key-file",
                                 job.key, "--name", name, "--address-file", job.file(name + ".json"), "--silence-ms",
                                 job.silence_ms, "--socket", job.socket(node), "--connect", job.coordinator,
                                 "--transport", "tcp"},
        job.file(name + ".out")));
    job.addresses(name);
  }
  Process first({kMinimal}, job.file("first"), job.environment(0));
  auto second = std::make_unique<Process>(std::vector{kMinimal}, job.file("second"), job.environment(1));
  const auto members = [&] { return job.status().value("members", nlohmann::json::array()).size(); };
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; })) << job.status().dump();
  const std::string log = read_file(job.file("node1.out"));
  EXPECT_NE(log.find("PID namespace that this daemon doesn't see"), std::string::npos) << log;
  EXPECT_NE(log.find("hostPID: true"), std::string::npos) << log;
  second.reset();
  EXPECT_TRUE(eventually([&] { return members() == 1; })) << "its end is known without its silence";
  second = std::make_unique<Process>(std::vector{kMinimal}, job.file("again"), job.environment(1));
  EXPECT_TRUE(eventually([&] { return members() == 2 && job.status()["members"][1]["role"] == "contributor"; }))
      << second->output();
  Process twin({kMinimal}, job.file("twin"), job.environment(1));
  EXPECT_EQ(twin.wait(std::chrono::seconds(15)), 1) << "a place is one process's\n" << twin.output();
  EXPECT_EQ(members(), 2u);
}

}  // namespace
}  // namespace rejoin::test
