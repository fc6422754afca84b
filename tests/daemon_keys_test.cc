// A job's key is changed while the job runs.
#include <gtest/gtest.h>

#include <map>

#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

constexpr std::uint32_t kReplicas = 3;

struct ChangingKeys : Job {
  const std::string old_key = key, new_key = scratch.write("new", "fedcba9876543210fedcba9876543210");
  std::map<std::uint32_t, std::unique_ptr<Process>> trainers, nodes;
  std::unique_ptr<Process> decides;

  static std::vector<std::string> other(const std::string& path) {
    return path.empty() ? std::vector<std::string>{} : std::vector<std::string>{"--other-job-key-file", path};
  }
  // Each with these keys from now on. What was there before has ended.
  void start_deciding(const std::string& own, const std::string& second) {
    key = own;
    decides.reset();
    auto arguments = other(second);
    for (const auto* more : {"--replicas", "3", "--ranks", "1", "--batch", "8", "--steps", "0"})
      arguments.push_back(more);
    if (!coordinator.empty()) arguments.insert(arguments.end(), {"--listen", coordinator});
    decides = start_coordinator(arguments);
  }
  void start_node_again(std::uint32_t number, const std::string& own, const std::string& second) {
    key = own;
    nodes[number].reset();
    std::filesystem::remove(file("node" + std::to_string(number) + ".json"));
    auto arguments = other(second);
    arguments.insert(arguments.end(), {"--connect", coordinator, "--transport", "tcp+aes"});
    nodes[number] = start_node(number, arguments);
  }
  void train(std::uint32_t replica) {
    auto all = environment(replica);
    all.emplace_back("REJOIN_TRANSPORT=tcp+aes");
    trainers[replica].reset();
    trainers[replica] =
        std::make_unique<Process>(std::vector{kMinimal}, file("trainer" + std::to_string(replica)), all);
  }
  std::uint64_t committed() const {
    const auto now = status();
    return now.is_null() ? 0 : now.at("committed").get<std::uint64_t>();
  }
  [[nodiscard]] bool all_train() const {
    if (!eventually([&] {
          const auto now = status();
          if (now.is_null() || now.at("members").size() != kReplicas) return false;
          for (const auto& member : now.at("members"))
            if (member.at("role") != "contributor") return false;
          return true;
        }))
      return false;
    const auto then = committed();
    return eventually([&] { return committed() > then + 10; });
  }
  // Who is a member, by its incarnation.
  std::map<std::uint32_t, std::uint64_t> members() const {
    std::map<std::uint32_t, std::uint64_t> found;
    const auto now = status();
    for (const auto& member : now.at("members")) found[member.at("replica")] = member.at("incarnation");
    return found;
  }
};

// With encrypted data connections, whose keys come from the job key too.
TEST(JobKey, IsChangedWhileAllTrainAndReplicasComeBackInEachRound) {
  ChangingKeys job;
  job.silence_ms = "4000";  // whoever starts again has that long
  const auto& before = job.old_key;
  const auto& after = job.new_key;
  job.start_deciding(before, "");
  for (std::uint32_t r = 0; r < kReplicas; ++r) job.start_node_again(r, before, "");
  for (std::uint32_t r = 0; r < kReplicas; ++r) job.train(r);
  ASSERT_TRUE(job.all_train()) << job.status().dump();

  const std::pair<std::string, std::string> rounds[] = {{before, after}, {after, before}, {after, ""}};
  for (const auto& [own, second] : rounds) {
    const auto at_first = job.members();
    job.start_deciding(own, second);
    job.start_node_again(0, own, second);
    ASSERT_TRUE(job.all_train()) << job.status().dump();
    // With some in this round and some in the one before: one that must connect with both kinds, and is served by both.
    job.train(1);
    ASSERT_TRUE(eventually([&] { return job.members()[1] > at_first.at(1); }));
    ASSERT_TRUE(job.all_train()) << job.status().dump();
    for (std::uint32_t r = 1; r < kReplicas; ++r) job.start_node_again(r, own, second);
    ASSERT_TRUE(job.all_train()) << job.status().dump();
    auto now = job.members();
    EXPECT_EQ(now.at(0), at_first.at(0)) << "it was put out";
    EXPECT_EQ(now.at(2), at_first.at(2)) << "it was put out";
  }

  // The old key is worth nothing any more: neither the daemon that still has it, nor its trainer.
  job.start_node_again(2, before, "");
  job.train(2);
  EXPECT_TRUE(eventually([&] {
    return job.nodes[2]->output().find("its job key differs from ours") != std::string::npos;
  })) << job.nodes[2]->output();
  EXPECT_TRUE(eventually([&] { return job.members().count(2) == 0; }));
  job.start_node_again(2, after, "");
  ASSERT_TRUE(job.all_train()) << job.status().dump();
  job.decides.reset();
  const auto audit = run({kCli, "audit", job.file("log") + "/decisions.log"});
  EXPECT_EQ(audit.status, 0) << audit.output;
}

}  // namespace
}  // namespace rejoin::test
