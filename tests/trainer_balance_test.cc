// One of three trainers computes three times as long for a sample as the others: it gets fewer of them, and all have
// the state that one process has which trains what the trainers were given.
#include <fmt/format.h>

#include <map>
#include <mutex>

#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

struct Balanced : Trained {
  static constexpr std::uint64_t kSteps = 45, kBatch = 16;
  static constexpr std::size_t kCount = 1000;
  using Batch = Session::Step::Batch;

  // Small whole numbers, so that sums of them are exact in any order.
  static float of_sample(std::uint64_t sample, std::size_t element) {
    return static_cast<float>((sample * 7 + element) % 16);
  }
  static std::uint64_t samples_of(const Batch& batch) {
    std::uint64_t samples = 0;
    for (const auto& range : batch) samples += range.end - range.begin;
    return samples;
  }
  // What a replica has trained, by step, and when it had ended each.
  struct Trains {
    std::map<std::uint64_t, Batch> batches;
    std::map<std::uint64_t, std::uint64_t> counts;  // what its gradients did in the mean
    std::map<std::uint64_t, std::chrono::steady_clock::time_point> ended;
    std::uint64_t digest = 0;
    std::vector<float> weights;
  };

  Trains train(Session& session, std::chrono::microseconds sample) const {
    Trains trains;
    for (;;) {
      const auto step = session.begin_step();
      if (!step || !*step) {
        EXPECT_TRUE(step) << step.error().message;
        break;
      }
      const auto begun = std::chrono::steady_clock::now();
      const Batch& batch = trains.batches[(*step)->number()] = (*step)->batch();
      trains.counts[(*step)->number()] = (*step)->weight();
      EXPECT_TRUE((*step)->weight() == 1 || (*step)->weight() == samples_of(batch));
      const auto gradient = Session::as<float>(*session.gradient(w));
      std::ranges::fill(gradient, 0.0f);
      for (const auto& range : batch)
        for (auto k = range.begin; k < range.end; ++k)
          for (std::size_t i = 0; i < kCount; ++i) gradient[i] += of_sample(k, i);
      if ((*step)->weight() == 1)  // all have the same number: the mean of the means
        for (float& value : gradient) value /= static_cast<float>(samples_of(batch));
      // As long as a GPU would take for them.
      std::this_thread::sleep_until(begun + sample * static_cast<std::int64_t>(samples_of(batch)));
      for (BucketId bucket : {0, 1}) EXPECT_TRUE(session.all_reduce(bucket));
      const auto committed = session.commit([&](const Update& update) {
        const auto weight = update.of(Session::as<float>(*session.weight(update.tensor)));
        for (std::size_t i = 0; i < weight.size(); ++i) weight[i] += update.gradient_as<float>()[i];
      });
      EXPECT_TRUE(committed) << committed.error().message;
      if (!committed) break;
      trains.ended[(*step)->number()] = std::chrono::steady_clock::now();
    }
    trains.digest = *session.state_digest();
    const auto weights = Session::as<float>(*session.weight(w));
    trains.weights.assign(weights.begin(), weights.end());
    return trains;
  }

  // One process that trains all that was given out, in the order of the ring.
  static std::vector<float> alone(const std::vector<Trains>& all) {
    std::vector<float> weights(kCount, 0.0f);
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      std::uint64_t samples = 0;
      bool equal = true;
      for (const auto& one : all) {
        samples += samples_of(one.batches.at(step));
        equal &= one.counts.at(step) == 1;
      }
      for (std::size_t i = 0; i < kCount; ++i) {
        float sum = 0;
        for (const auto& one : all) {
          float own = 0;
          for (const auto& range : one.batches.at(step))
            for (auto k = range.begin; k < range.end; ++k) own += of_sample(k, i);
          sum += own;
        }
        // Multiples of 2⁻⁴ as long as all have sixteen: the mean of the means is that of all, to the last bit.
        if (equal) weights[i] += sum / kBatch * (1.0f / static_cast<float>(all.size()));
        else weights[i] += sum * (1.0f / static_cast<float>(samples));
      }
    }
    return weights;
  }
};

TEST_F(Balanced, AReplicaThatIsSlowerTrainsFewerSamplesAndAllStatesAreEqual) {
  silence_ms = std::to_string(std::chrono::milliseconds(kSilence).count());
  processes.push_back(start_coordinator({"--replicas", "3", "--ranks", "1", "--batch", std::to_string(kBatch),
                                         "--steps", std::to_string(kSteps), "--balance-batches"}));
  std::vector<std::unique_ptr<Session>> sessions;
  for (std::uint32_t r = 0; r < 3; ++r) {
    processes.push_back(start_node(r, {"--connect", coordinator}));
    sessions.push_back(declared(config(r), kCount));
    sessions.back()->use_weights();
  }
  std::vector<std::future<Trains>> ends;
  for (std::uint32_t r = 0; r < 3; ++r)
    ends.push_back(std::async(std::launch::async, [this, &sessions, r] {
      EXPECT_TRUE(sessions[r]->join());
      return train(*sessions[r], r == 2 ? 3ms : 1ms);
    }));
  nlohmann::json named;
  EXPECT_TRUE(eventually([&] {
    const auto now = status();
    if (now.is_null()) return false;
    if (!now.at("stragglers").empty()) named = now;
    return !named.is_null() || now.at("finished").get<bool>();
  }));
  ASSERT_FALSE(named.is_null()) << "nobody was named: " << log_of("coordinator");
  EXPECT_EQ(named.at("stragglers").at(0).at("what"), "compute");
  EXPECT_EQ(named.at("stragglers").at(0).at("replica"), 2);
  EXPECT_GT(named.at("stragglers").at(0).at("times").get<double>(), 1.25);
  EXPECT_TRUE(named.at("balance").at("on").get<bool>());

  std::vector<Trains> all;
  for (auto& end : ends) all.push_back(end.get());
  std::map<std::uint64_t, int> trained;
  std::vector<std::uint64_t> late(3);  // samples of each in the last twenty steps
  for (std::uint32_t r = 0; r < 3; ++r) {
    ASSERT_EQ(all[r].batches.size(), kSteps);
    EXPECT_EQ(all[r].digest, all[0].digest);
    for (const auto& [step, batch] : all[r].batches) {
      for (const auto& range : batch)
        for (auto k = range.begin; k < range.end; ++k) ++trained[k];
      if (step + 20 > kSteps) late[r] += samples_of(batch);
    }
  }
  EXPECT_EQ(trained.size(), 3 * kBatch * kSteps);
  EXPECT_EQ(trained.rbegin()->first + 1, trained.size()) << "each once, and none left out";
  EXPECT_LT(late[2] * 10, late[0] * 8) << late[0] << ", " << late[1] << " and " << late[2] << " samples";
  EXPECT_EQ(all[0].weights, alone(all)) << "the mean over all samples, bit for bit";

  const auto rate = [&](std::uint64_t from, std::uint64_t to) {
    const std::chrono::duration<double> took = all[0].ended.at(to) - all[0].ended.at(from);
    return static_cast<double>(to - from) / took.count();
  };
  fmt::print("{:.1f} steps a second with equal batches, {:.1f} with balanced ones ({} and {} samples): {:.2f} times\n",
             rate(1, 8), rate(kSteps - 20, kSteps), late[0] / 20, late[2] / 20, rate(kSteps - 20, kSteps) / rate(1, 8));
}

}  // namespace
}  // namespace rejoin::test
