// The benches that run jobs: what they make of flight recordings, and the programs themselves.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/job_times.h"
#include "tests/process.h"

namespace rejoin::bench {
namespace {

using events::Kind;

TEST(Distribution, GivesTheValueThatSoManyAreNotAbove) {
  std::vector<double> values(100);
  std::iota(values.rbegin(), values.rend(), 1);
  const Distribution all(values);
  EXPECT_EQ(all.at(0.5), 50);
  EXPECT_EQ(all.at(0.99), 99);
  EXPECT_EQ(all.most(), 100);
  EXPECT_EQ(all.mean(), 50.5);
  EXPECT_EQ(Distribution({7}).at(0.99), 7);
  EXPECT_EQ(Distribution().at(0.5), 0);
}

void add(daemon::Recording& to, std::int64_t at, Kind kind, std::uint64_t step, std::uint64_t a = 0,
         std::uint64_t epoch = 1) {
  to.events.push_back({.at = at, .kind = kind, .numbers = {.epoch = epoch, .step = step, .a = a}, .text = ""});
}

// A step of a trainer that begins at `at`, in µs: each thing a given time after the one before.
void add_step(daemon::Recording& to, std::int64_t at, std::uint64_t step, std::array<std::int64_t, 6> after,
              std::uint64_t epoch = 1) {
  constexpr std::array kinds{Kind::computed, Kind::bucket_begun, Kind::bucket_done,
                             Kind::reduced,  Kind::committed,    Kind::updated};
  add(to, at * 1000, Kind::step, step, 0, epoch);
  for (std::size_t i = 0; i < kinds.size(); ++i) add(to, (at += after[i]) * 1000, kinds[i], step, 0, epoch);
}

TEST(StepsOf, NamesPartsThatSumToTheStepAndLeavesOutStepsThatAreNotWhole) {
  std::vector<daemon::Recording> trainers(2);
  daemon::Recording coordinator;
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const auto at = static_cast<std::int64_t>(step) * 1000;
    add_step(trainers[0], at, step, {1, 10, 100, 5, 200, 20});
    add_step(trainers[1], at + 7, step, {2, 30, 80, 15, 190, 25});
    add(coordinator, (at + 180) * 1000, Kind::appended, 0, 30'000);  // from 150 µs
    if (step != 3) add(coordinator, (at + 181) * 1000, Kind::commit, step);
  }
  const auto steps = steps_of(trainers, coordinator, 1, 5);
  ASSERT_EQ(steps.whole.size(),
            4u);  // of steps 1 and 2: the third one's decision is missing, the fourth has no next one
  for (std::size_t i = 0; i < steps.whole.size(); ++i) {
    double sum = 0;
    for (const auto& part : steps.parts) {
      EXPECT_GE(part[i], 0);
      sum += part[i];
    }
    EXPECT_NEAR(sum, steps.whole[i], 1e-9);
    EXPECT_EQ(steps.whole[i], 1000);
  }
  const auto of = [&](std::string_view name, std::size_t i) {
    const auto part = std::find_if(kParts.begin(), kParts.end(), [&](const Part& each) { return each.name == name; });
    return steps.parts[static_cast<std::size_t>(part - kParts.begin())][i];
  };
  EXPECT_EQ(of("wake-up", 0), 10);
  EXPECT_EQ(of("others", 0), 28);      // the other one began at 39, this one at 11
  EXPECT_EQ(of("all-reduce", 0), 72);  // … until 111
  EXPECT_EQ(of("others", 1), 0);
  EXPECT_EQ(of("slowest", 0), 18);  // its own report at 116, the other's at 134
  EXPECT_EQ(of("gather", 1), 16);   // until 150
  EXPECT_EQ(of("log", 1), 30);
  EXPECT_EQ(of("plan", 0), 136);  // from 180 to 316
}

TEST(StepsOf, LeavesOutAStepOfWhichSomethingHappenedTwiceOrInTwoEpochs) {
  std::vector<daemon::Recording> trainers(2);
  daemon::Recording coordinator;
  for (std::uint64_t step = 1; step <= 4; ++step)
    for (auto& trainer : trainers) {
      add_step(trainer, static_cast<std::int64_t>(step) * 1000, step, {1, 1, 1, 1, 1, 1},
               step == 2 && &trainer == &trainers[1] ? 2 : 1);
      if (step == 3) add(trainer, 3'500'000, Kind::bucket_done, step, 0, 2);
      add(coordinator, static_cast<std::int64_t>(step) * 1'000'000 + 1, Kind::appended, 0, 1);
      add(coordinator, static_cast<std::int64_t>(step) * 1'000'000 + 2, Kind::commit, step);
    }
  EXPECT_EQ(steps_of(trainers, coordinator, 1, 5).whole.size(), 2u);  // of step 1
}

TEST(GoingOn, CountsWhatIsOfTheNextEpoch) {
  daemon::Recording survivor;
  const auto ms = [](std::int64_t at) { return at * 1'000'000; };
  add(survivor, ms(1), Kind::enter_epoch, 5, 0, 3);
  add(survivor, ms(9), Kind::bucket_done, 7, 0, 3);   // before the loss
  add(survivor, ms(11), Kind::bucket_done, 8, 0, 3);  // it was under way, and came to its end
  add(survivor, ms(12), Kind::committed, 8, 0, 3);
  const TimePoint since{std::chrono::milliseconds(10)};
  EXPECT_FALSE(going_on(survivor, since).epoch || going_on(survivor, since).commit);
  add(survivor, ms(20), Kind::enter_epoch, 9, 0, 4);
  add(survivor, ms(25), Kind::bucket_done, 9, 0, 4);
  EXPECT_FALSE(going_on(survivor, since).commit);
  add(survivor, ms(31), Kind::committed, 9, 0, 4);
  add(survivor, ms(40), Kind::bucket_done, 10, 0, 4);
  const auto went = going_on(survivor, since);
  EXPECT_EQ(went.epoch, 10e6);
  EXPECT_EQ(went.all_reduce, 15e6);
  EXPECT_EQ(went.commit, 21e6);
}

nlohmann::json results_of(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
  test::Scratch scratch;
  arguments.front() = test::binaries() + "/" + arguments.front();
  arguments.insert(arguments.end(), {"--json", scratch.path + "/out.json"});
  const auto ended = test::run(arguments, environment);
  EXPECT_EQ(ended.status, 0) << ended.output;
  return nlohmann::json::parse(test::read_file(scratch.path + "/out.json"), nullptr, false);
}

TEST(StepPerf, NamesAllOfAStep) {
  const auto json = results_of({"rejoin_step_perf", "-s", "4K", "--replicas", "2,3", "-n", "60", "-w", "20"});
  ASSERT_FALSE(json.is_discarded());
  ASSERT_EQ(json.at("rows").size(), 2u);
  EXPECT_GT(json.at("wake_up_us"), 0);
  for (const auto& row : json.at("rows")) {
    EXPECT_GE(row.at("steps"), 40);
    EXPECT_GT(row.at("bare_us"), 0);
    double sum = 0;
    for (const auto& part : row.at("parts")) {
      EXPECT_GE(part.at("us"), 0) << row.dump(1);
      sum += part.at("us").get<double>();
    }
    EXPECT_NEAR(sum, row.at("step_us").get<double>(), 0.01);
    EXPECT_EQ(row.at("costs").size(), 3u);
    for (const auto& cost : row.at("costs")) EXPECT_GT(cost.at("cpu_us"), 0);
  }
}

// The progress thread may sleep for a tenth of a second where nothing goes on, and streams wake nobody.
TEST(StepPerf, OnAGpuNoStepWaitsForAThreadThatSleeps) {
  const auto json =
      results_of({"rejoin_step_perf", "-s", "4K", "--replicas", "2", "-n", "60", "-w", "5", "--use_cuda", "0"},
                 {"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA});
  ASSERT_FALSE(json.is_discarded());
  EXPECT_LT(json.at("rows").at(0).at("step_p50_us"), 90'000);
}

TEST(RecoveryPerf, SurvivorsOfAKillAndOfAStopGoOn) {
  const auto json = results_of({"rejoin_recovery_perf", "-s", "64K", "--kills", "2", "--stops", "1", "--silence-ms",
                                "400", "--torch", "/nonexistent/python"});
  ASSERT_FALSE(json.is_discarded());
  ASSERT_EQ(json.at("rows").size(), 2u);
  for (const auto& row : json.at("rows")) {
    const bool stopped = row.at("member") == "stop";
    EXPECT_EQ(row.at("commit").at("rounds"), stopped ? 1 : 2);
    EXPECT_GT(row.at("epoch").at("p50_ms"), stopped ? 200 : 0);  // most of the silence must pass
    for (const auto* order : {"p50_ms", "max_ms"}) {
      EXPECT_LE(row.at("epoch").at(order), row.at("all_reduce").at(order)) << row.dump(1);
      EXPECT_LE(row.at("all_reduce").at(order), row.at("commit").at(order)) << row.dump(1);
    }
  }
  EXPECT_NE(json.at("gloo_missing").get<std::string>().find("/nonexistent/python: No such file"), std::string::npos);
}

TEST(JobBenches, LeaveNothingBehindWhenTheyAreInterrupted) {
  test::Scratch scratch, temporary;
  test::Process process({test::binaries() + "/rejoin_step_perf", "-s", "4K", "--replicas", "2", "-w", "1000000"},
                        scratch.path + "/out", {"TMPDIR=" + temporary.path});
  const auto empty = [&] { return std::filesystem::is_empty(temporary.path); };
  ASSERT_TRUE(test::eventually([&] { return !empty(); })) << process.output();
  ::kill(process.pid(), SIGTERM);
  EXPECT_EQ(process.wait(std::chrono::seconds(20)), 1) << process.output();
  EXPECT_NE(process.output().find("interrupted while waiting for"), std::string::npos) << process.output();
  EXPECT_TRUE(empty());
}

TEST(JobBenches, WrongUseIsNamed) {
  const auto step = test::run({test::binaries() + "/rejoin_step_perf", "-s", "65"});
  EXPECT_EQ(step.status, 2);
  EXPECT_NE(step.output.find("--sizes must be multiples of 4, and 65 is none"), std::string::npos) << step.output;
  const auto python = test::run(
      {test::binaries() + "/rejoin_step_perf", "-s", "4K", "--replicas", "1", "--python", "/nonexistent/python"});
  EXPECT_EQ(python.status, 1);
  EXPECT_NE(
      python.output.find("trainer0 has ended while waiting for warm-up; it said: /nonexistent/python: No such file"),
      std::string::npos)
      << python.output;
}

}  // namespace
}  // namespace rejoin::bench
