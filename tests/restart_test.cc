// A whole job that starts again from its checkpoint, and a trainer that does more than to train: the real programs.
#include <fmt/format.h>

#include <future>
#include <map>
#include <set>
#include <sstream>

#include "rejoin/session.h"
#include "tests/daemons.h"
#include "tests/session_config.h"

namespace rejoin::test {
namespace {

const std::string kTrainer = binaries() + "/rejoin-real-trainer";
constexpr std::uint64_t kBatch = 4;
constexpr auto kLimit = std::chrono::seconds(60);

std::string after(const std::string& text, const std::string& what) {
  const auto at = text.find(what);
  return at == std::string::npos ? "" : text.substr(at + what.size(), text.find('\n', at) - at - what.size());
}

// Two replicas of one rank each that share a directory for checkpoints.
struct Job : Daemons {
  std::vector<std::unique_ptr<Process>> daemons, trainers;
  const std::string directory = file("state");
  std::uint64_t steps = 400;

  Job() { std::filesystem::create_directory(directory); }
  void start_daemons(std::vector<std::string> more = {}) {
    std::vector<std::string> shape{
        "--replicas", "2", "--ranks", "1", "--batch", std::to_string(kBatch), "--steps", std::to_string(steps)};
    shape.insert(shape.end(), more.begin(), more.end());
    daemons.push_back(start_coordinator(shape));
    for (std::uint32_t node : {0, 1}) {
      std::filesystem::remove(file(fmt::format("node{}.json", node)));
      daemons.push_back(start_node(node, {"--connect", coordinator}));
    }
  }
  std::unique_ptr<Process> trainer(std::uint32_t replica) const {
    return std::make_unique<Process>(std::vector<std::string>{kTrainer, REJOIN_DATA, directory, "--every", "20"},
                                     file(fmt::format("trainer{}", replica)),
                                     std::vector<std::string>{fmt::format("REJOIN_REPLICA={}", replica),
                                                              "REJOIN_RANK=0", "REJOIN_SOCKET=" + socket(replica)});
  }
  void start_trainers() {
    for (std::uint32_t replica : {0, 1}) trainers.push_back(trainer(replica));
  }
  void kill_everything() {  // at once
    for (const auto* some : {&trainers, &daemons})
      for (const auto& process : *some) ::kill(process->pid(), SIGKILL);
    trainers.clear();
    daemons.clear();
  }
  // All of it, when it has a checkpoint of this step or a later one.
  bool dies_after_checkpoint(std::uint64_t step) {
    start_daemons();
    start_trainers();
    const bool saved = eventually([&] { return checkpoint() >= step; }, kLimit);
    EXPECT_TRUE(saved) << trainers[0]->output();
    kill_everything();
    return saved;
  }
  std::uint64_t checkpoint() const {
    const std::string step = after(read_file(directory + "/checkpoint.0").substr(0, 1000), "step=");
    return step.empty() ? 0 : std::stoull(step);
  }
  // Waits for both; the digest with which they end, which is the same.
  std::string digest() {
    std::set<std::string> digests;
    for (auto& process : trainers) {
      EXPECT_EQ(process->wait(kLimit), 0) << process->output();
      digests.insert(after(process->output(), "finished, digest "));
    }
    EXPECT_EQ(digests.size(), 1u);
    return *digests.begin();
  }
  std::string audit() const {
    return run({kCli, "audit", file(log_directory) + "/decisions.log", "--steps", std::to_string(steps)}).output;
  }
  // By what the trainers themselves say: how often each sample was trained in a step that counts.
  std::map<std::uint64_t, int> trained() const {
    std::map<std::pair<std::uint64_t, int>, std::vector<std::uint64_t>> by_step;  // what was said last of it
    for (int replica : {0, 1}) {
      std::istringstream lines(read_file(fmt::format("{}/metrics.{}.0", directory, replica)));
      for (std::string line, word; std::getline(lines, line);) {
        if (line.find("loss") == std::string::npos) continue;
        std::istringstream words(line);
        std::uint64_t step = 0, begin = 0, end = 0;
        words >> word >> step;
        auto& samples = by_step[{step, replica}];
        samples.clear();
        while (words >> word && word == "samples" && words >> begin >> end)
          for (auto sample = begin; sample < end; ++sample) samples.push_back(sample);
      }
    }
    std::map<std::uint64_t, int> times;
    for (const auto& [step, samples] : by_step)
      for (auto sample : samples) ++times[sample];
    return times;
  }
  // What both replicas say of the step as a whole, by step: what each says alone, or the same.
  std::map<std::uint64_t, std::string> expect_equal_metrics() const {
    std::map<std::uint64_t, std::string> metrics;
    for (int replica : {0, 1}) {
      std::istringstream lines(read_file(fmt::format("{}/metrics.{}.0", directory, replica)));
      for (std::string line, word; std::getline(lines, line);) {
        const auto at = line.find("loss");
        if (at == std::string::npos) continue;
        std::istringstream words(line);
        std::uint64_t step = 0;
        words >> word >> step;
        const auto known = metrics.emplace(step, line.substr(at)).first;
        EXPECT_EQ(known->second, line.substr(at)) << "step " << step;
      }
    }
    return metrics;
  }
  void expect_each_sample_once() const {
    const auto times = trained();
    EXPECT_EQ(times.size(), steps * kBatch * 2);
    EXPECT_EQ(times.empty() ? 0 : times.rbegin()->first, steps * kBatch * 2 - 1);
    for (const auto& [sample, count] : times) EXPECT_EQ(count, 1) << "sample " << sample;
  }
};

// What a job ends with that nothing has happened to.
const std::string& undisturbed() {
  static const std::string digest = [] {
    Job job;
    job.start_daemons();
    job.start_trainers();
    const std::string ends_with = job.digest();
    job.expect_each_sample_once();
    return ends_with;
  }();
  return digest;
}

// Everything dies, and the coordinator's log with it.
TEST(Restart, FromACheckpointAloneEverySampleIsTrainedOnceAndTheBitsAreTheSame) {
  Job job;
  ASSERT_TRUE(job.dies_after_checkpoint(40));
  const auto from = job.checkpoint();
  ASSERT_LT(from, job.steps) << "it was killed in time";
  std::filesystem::remove_all(job.file(job.log_directory));

  job.start_daemons();
  job.start_trainers();
  EXPECT_EQ(job.digest(), undisturbed());
  const std::string audit = job.audit();
  EXPECT_NE(audit.find(fmt::format("{0} steps committed in 1 epochs; {1} samples: {1} trained once, 0 lost, 0 repeated",
                                   job.steps, job.steps * kBatch * 2)),
            std::string::npos)
      << audit;
  EXPECT_NE(audit.find(fmt::format("{} of them are trained by the checkpoint of step {}", from * kBatch * 2, from)),
            std::string::npos)
      << audit;
  EXPECT_NE(audit.find(fmt::format("epoch    1 after step {:>7}", from)), std::string::npos) << audit;
  const std::string log = read_file(job.file("coordinator.out"));
  EXPECT_NE(log.find(fmt::format("the job goes on after step {}, from checkpoints that say", from)), std::string::npos)
      << log;
  job.expect_each_sample_once();
}

// With its log the coordinator knows all by itself; the checkpoint is older, as a rule, and an operator allows it.
TEST(Restart, WithTheCoordinatorsLogItIsTheSame) {
  Job job;
  ASSERT_TRUE(job.dies_after_checkpoint(40));
  const auto from = job.checkpoint();
  job.start_daemons({"--roll-back-to", std::to_string(from)});
  job.start_trainers();
  EXPECT_EQ(job.digest(), undisturbed());
  const std::string audit = job.audit();
  EXPECT_NE(audit.find(" 0 lost, 0 repeated, 0 to be trained again"), std::string::npos) << audit;
  EXPECT_EQ(audit.find("by the checkpoint of"), std::string::npos) << audit;
  job.expect_each_sample_once();
}

// It would train until its first checkpoint, and then end in the middle of the job.
TEST(Restart, ATrainerWhoseDirectoryCannotBeWrittenToIsRefusedBeforeItJoins) {
  Daemons job;
  std::ofstream(job.file("no directory")) << "a file";
  std::filesystem::create_directories(job.file("metrics taken/metrics.0.0"));
  for (const std::string directory : {"not there", "no directory", "metrics taken"}) {
    Process trainer({kTrainer, REJOIN_DATA, job.file(directory), "--every", "20"}, job.file("output"),
                    {"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(0)});
    EXPECT_EQ(trainer.wait(kLimit), 2) << directory;
    const std::string said = trainer.output();
    EXPECT_NE(said.find("can't write " + job.file(directory)), std::string::npos) << said;
    EXPECT_NE(said.find("DIRECTORY has to be there, and to let checkpoints and metrics be written"), std::string::npos)
        << said;
  }
  EXPECT_TRUE(std::filesystem::exists(job.file("metrics taken")));
  EXPECT_FALSE(std::filesystem::exists(job.file("not there"))) << "it may be misspelt";
}

// Somebody wants the result of a job that is finished.
TEST(Restart, OfAFinishedJobWithTheCheckpointOfItsLastStepGivesItsState) {
  Job job;
  job.steps = 40;
  job.start_daemons();
  job.start_trainers();
  const std::string digest = job.digest();
  ASSERT_EQ(job.checkpoint(), 40u);
  const auto digest_of_others = [&] {
    job.trainers.clear();
    for (const char* output : {"trainer0", "trainer1"}) std::filesystem::remove(job.file(output));
    job.start_trainers();
    return job.digest();
  };
  const std::string not_its = "was finished with step 40 before this replica had a part in it: its state is not the ";
  const auto says = [&] { return job.trainers[0]->output().find(not_its) != std::string::npos; };
  EXPECT_EQ(digest_of_others(), digest);
  EXPECT_FALSE(says()) << job.trainers[0]->output();
  std::filesystem::remove_all(job.directory);
  std::filesystem::create_directory(job.directory);
  EXPECT_NE(digest_of_others(), digest);
  EXPECT_TRUE(says()) << job.trainers[0]->output();
}

TEST(Restart, ACheckpointThatIsDamagedOrNotWholeIsRefusedWithTheReason) {
  Job job;
  ASSERT_TRUE(job.dies_after_checkpoint(20));
  job.start_daemons();
  const std::string path = job.directory + "/checkpoint.0", good = read_file(path);
  const auto start_with = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    const auto process = job.trainer(0);
    EXPECT_EQ(process->wait(kLimit), 1);
    return process->output();
  };
  std::string other = good;
  other[other.size() - 3] = static_cast<char>(other[other.size() - 3] ^ 1);
  EXPECT_NE(start_with(other).find("the state that was restored is not the one that this position of step"),
            std::string::npos);
  other = good;
  other[other.find("trained=0-") + 10] ^= 1;
  EXPECT_NE(start_with(other).find("is not a whole Rejoin position"), std::string::npos);
}

// One replica dies and comes back while the other trains: what it catches up with was clipped, too.
TEST(RealTrainer, AReplicaThatComesBackClipsByTheSameNorms) {
  Job job;
  job.steps = 2000;  // time to catch up in
  job.start_daemons();
  job.start_trainers();
  ASSERT_TRUE(eventually([&] { return job.checkpoint() >= 20; }, kLimit));
  job.trainers[1].reset();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  job.trainers[1] = job.trainer(1);
  job.digest();
  job.expect_equal_metrics();
  const std::string audit = job.audit();
  EXPECT_NE(audit.find("(catching up)"), std::string::npos) << audit;
  EXPECT_NE(audit.find(" 0 repeated"), std::string::npos) << audit;
}

TEST(RealTrainer, ATerminatedReplicaLeavesAndTheRateFollowsTheNumberOfContributors) {
  Job job;
  job.steps = 200;
  job.start_daemons();
  job.start_trainers();
  ASSERT_TRUE(eventually([&] { return job.checkpoint() >= 20; }, kLimit));
  ::kill(job.trainers[1]->pid(), SIGTERM);
  EXPECT_EQ(job.trainers[1]->wait(kLimit), 128 + SIGTERM);
  EXPECT_NE(job.trainers[1]->output().find("this replica has left"), std::string::npos) << job.trainers[1]->output();
  EXPECT_EQ(job.trainers[0]->wait(kLimit), 0) << job.trainers[0]->output();
  EXPECT_NE(read_file(job.file("node1.out")).find("replica 1 rank 0 has left"), std::string::npos);
  const auto metrics = job.expect_equal_metrics();
  const auto rate = [&](std::uint64_t step) { return std::stod(after(metrics.at(step), "rate ")); };
  EXPECT_NEAR(rate(20), 3e-3, 1e-6) << "of two replicas";
  EXPECT_LT(rate(200), rate(20) / 2) << "of one";
}

// A replica's session on a weight of ten elements, whose trainer does something else for as long as it likes when it
// has committed step 8: until it is told to go on.
void train_with_a_break(const Job& job, std::uint32_t replica, int go, std::chrono::milliseconds between_steps) {
  auto config = config_of(job, replica);
  config.between_steps = between_steps;
  auto session = *Session::open(config);
  const TensorId w = *session->add({.name = "w", .count = 10});
  if (!session->bucket({w}) || !session->allocate() || !session->join()) return;
  char may = 0;
  for (auto step = session->begin_step(); step && *step; step = session->begin_step()) {
    if (((*step)->contributes() && !session->all_reduce(0)) || !session->commit([](const Update&) {})) return;
    if ((*step)->number() == 8 && go >= 0 && ::read(go, &may, 1) != 1) return;
  }
}

struct Break : Job {
  int go[2];
  std::vector<pid_t> processes;

  explicit Break(std::chrono::milliseconds between_steps) {
    EXPECT_EQ(::pipe(go), 0);
    start_daemons();
    for (std::uint32_t replica : {0, 1}) {
      processes.push_back(::fork());
      if (processes.back() != 0) continue;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      train_with_a_break(*this, replica, replica == 0 ? go[0] : -1, between_steps);
      ::_exit(0);
    }
    EXPECT_TRUE(eventually([&] { return status().at("committed") == 8; })) << status().dump();
  }
  ~Break() {
    for (auto pid : processes) ::kill(pid, SIGKILL), ::waitpid(pid, nullptr, 0);
  }
  bool somebody_is_out() const { return status().at("members").size() != 2; }
};

TEST(BetweenSteps, AnEvaluationOfManySilencesPutsNobodyOut) {
  Break job(std::chrono::minutes(1));
  EXPECT_FALSE(eventually([&] { return job.somebody_is_out(); }, std::chrono::seconds(5))) << job.status().dump();
  EXPECT_NE(run({kCli, "status", job.coordinator_status}).output.find("its trainer, which is between steps"),
            std::string::npos);
  ASSERT_EQ(::write(job.go[1], "x", 1), 1);
  EXPECT_TRUE(eventually([&] { return job.status().at("committed") == job.steps; })) << job.status().dump();
  EXPECT_EQ(job.audit().find("epoch    2"), std::string::npos) << job.audit();
}

TEST(BetweenSteps, WhoTakesLongerThanItMayIsOut) {
  Break job(std::chrono::milliseconds(1000));
  EXPECT_TRUE(eventually([&] { return job.status().at("committed") > 8; })) << job.status().dump();
  EXPECT_NE(job.audit().find("without replica 0"), std::string::npos) << job.audit();
}

TEST(RealTrainer, LearnsAndTellsSo) {
  Job job;
  job.start_daemons();
  job.start_trainers();
  job.digest();
  std::string told;
  for (int replica : {0, 1}) told += read_file(fmt::format("{}/metrics.{}.0", job.directory, replica));
  EXPECT_LT(std::stod(told.substr(told.rfind("evaluated ") + 10)), std::stod(after(told, "evaluated ")) - 0.2) << told;
}

}  // namespace
}  // namespace rejoin::test
