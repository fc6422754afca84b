#include "sim/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/digest.h"

namespace rejoin::sim {

namespace {

Model::Views views_of(std::vector<std::vector<float>>& vectors) { return {vectors.begin(), vectors.end()}; }

}  // namespace

Replay::Replay(const Model& model, std::uint32_t ranks, const Travel& travel)
    : model_(model), travel_(travel), ranks_(ranks) {
  start_over();
}

void Replay::start_over() {
  steps_.clear();
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    State& state = ranks_[rank] = {};
    for (const auto& tensor : model_.tensors()) {
      state.weights.emplace_back(tensor.count);
      state.moments.emplace_back(tensor.moments, std::vector<float>(tensor.count));
      state.debts.resize(std::max<std::size_t>(state.debts.size(), tensor.bucket + 1));
    }
    model_.initialise(rank, views_of(state.weights));
    remember(rank, 0);
  }
}

void Replay::on_record(const proto::LogRecord& record) {
  if (record.has_epoch()) members_.assign(record.epoch().members().begin(), record.epoch().members().end());
  if (record.has_committed()) {
    Step& step = steps_.emplace_back(Step{.record = record.committed()});
    step.results.resize(ranks_.size());
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      auto& ring = step.rings.emplace_back();
      for (const bool catching_up : {false, true})
        for (const auto& member : members_)
          if (member.catching_up() == catching_up) ring.push_back(coding_of_[{rank, member.incarnation()}]);
      if (!waits(step, rank)) train(step, rank);
    }
  }
  if (!record.has_rolled_back()) return;
  const auto before = std::move(steps_);
  const std::size_t kept = std::min<std::size_t>(before.size(), record.rolled_back().version());
  start_over();
  for (std::size_t i = 0; i < kept; ++i) {
    steps_.push_back(before[i]);
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank)
      if (!waits(before[i], rank)) train(before[i], rank);
  }
}

void Replay::on_begun(std::uint32_t rank, std::uint64_t incarnation, const CodedRing::Member& member) {
  coding_of_[{rank, incarnation}] = member;
}

void Replay::on_result(std::uint32_t rank, std::uint64_t step, const std::vector<BytesView>& buckets) {
  if (steps_.empty() || steps_.back().record.step() != step || !waits(steps_.back(), rank)) return;
  Buckets& results = steps_.back().results[rank].emplace();
  for (const auto bucket : buckets) {
    auto& values = results.emplace_back(bucket.size() / sizeof(float));
    std::memcpy(values.data(), bucket.data(), bucket.size());
  }
  train(steps_.back(), rank);
}

void Replay::train(const Step& step, std::uint32_t rank) {
  State& state = ranks_[rank];
  // Of a state that is not known neither are the gradients: nobody who lived has applied a step before.
  if (state.digests.empty() || state.digests.rbegin()->first + 1 != step.record.step()) return;
  std::vector<std::vector<float>> one;
  for (const auto& tensor : model_.tensors()) one.emplace_back(tensor.count);
  Contributions all;
  for (const auto& member : step.record.members()) {
    const std::uint64_t weight = std::max<std::uint64_t>(1, member.weight());
    all.weights += weight;
    (void)model_.backward(rank, views_of(state.weights), views_of(one), membership::batch_of(member));
    auto& buckets = all.of.emplace_back(state.debts.size());
    for (std::size_t t = 0; t < one.size(); ++t)
      for (const float value : one[t])
        buckets[model_.tensors()[t].bucket].push_back(value * static_cast<float>(weight));
  }
  Buckets results;
  for (std::uint32_t bucket = 0; bucket < state.debts.size(); ++bucket)
    results.push_back(result_of(step, rank, bucket, all));
  std::vector<std::size_t> used(results.size());
  for (std::uint32_t t = 0; t < one.size(); ++t) {
    const auto bucket = model_.tensors()[t].bucket;
    const auto gradient = std::span(results[bucket]).subspan(used[bucket], one[t].size());
    used[bucket] += one[t].size();
    model_.update(step.record.step(), t, state.weights[t], views_of(state.moments[t]), gradient);
  }
  remember(rank, step.record.step());
}

std::vector<float> Replay::result_of(const Step& step, std::uint32_t rank, std::uint32_t bucket,
                                     const Contributions& all) {
  std::vector<std::vector<float>> inputs;
  for (const auto& of_one : all.of) inputs.push_back(of_one[bucket]);
  std::vector<float> mean(inputs[0].size()), magnitudes(mean.size());
  const float share = 1.0f / static_cast<float>(all.weights);
  for (const auto& input : inputs)
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += input[i], magnitudes[i] += std::abs(input[i]) * share;
  if (all.weights > 1)
    for (float& value : mean) value *= share;
  if (!travel_.coded || mean.size() * sizeof(float) <= travel_.direct_bytes) return mean;
  State& state = ranks_[rank];
  const auto& ring = step.rings[rank];
  const float factor = travel_.factor(step.record.step() - 1);
  auto result = travel_.follows_times ? (*step.results[rank])[bucket]
                                      : state.ring.mean(step.record.step(), bucket, ring, inputs,
                                                        static_cast<std::uint32_t>(all.weights), factor);
  std::set<std::uint64_t> processes;
  for (std::size_t i = 0; i < inputs.size(); ++i) processes.insert(ring[i].process);
  if (auto wrong = state.debts[bucket].add(mean, result, magnitudes, processes, factor); wrong && !lost_)
    lost_ = fmt::format("after step {} of rank {} in bucket {}: {}", step.record.step(), rank, bucket, *wrong);
  return result;
}

void Replay::remember(std::uint32_t rank, std::uint64_t version) {
  State& state = ranks_[rank];
  std::vector<Model::Views> moments;
  for (auto& of_tensor : state.moments) moments.push_back(views_of(of_tensor));
  state.digests[version] = digest_of(views_of(state.weights), moments);
}

std::optional<std::uint64_t> Replay::digest(std::uint32_t rank, std::uint64_t version) const {
  auto found = ranks_[rank].digests.find(version);
  return found == ranks_[rank].digests.end() ? std::nullopt : std::optional(found->second);
}

std::uint64_t Replay::digest_of(const Model::Views& weights, const std::vector<Model::Views>& moments) {
  const auto bytes = [](std::span<const float> values) {
    return BytesView(reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  };
  std::uint64_t all = 0;
  for (std::size_t t = 0; t < weights.size(); ++t) {
    all = combine_digests(all, rejoin::digest(bytes(weights[t])));
    for (const auto& moment : moments[t]) all = combine_digests(all, rejoin::digest(bytes(moment)));
  }
  return all;
}

}  // namespace rejoin::sim
