#include "sim/replay.h"

#include <algorithm>

#include "base/digest.h"

namespace rejoin::sim {

namespace {

Model::Views views_of(std::vector<std::vector<float>>& vectors) { return {vectors.begin(), vectors.end()}; }

}  // namespace

Replay::Replay(const Model& model, std::uint32_t ranks) : model_(model), ranks_(ranks) { start_over(); }

void Replay::start_over() {
  steps_.clear();
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    State& state = ranks_[rank] = {};
    for (const auto& tensor : model_.tensors()) {
      state.weights.emplace_back(tensor.count);
      state.moments.emplace_back(tensor.moments, std::vector<float>(tensor.count));
    }
    model_.initialise(rank, views_of(state.weights));
    remember(rank, 0);
  }
}

void Replay::on_record(const proto::LogRecord& record) {
  if (record.has_committed()) train(record.committed());
  if (!record.has_rolled_back()) return;
  const auto before = std::move(steps_);
  const std::size_t kept = std::min<std::size_t>(before.size(), record.rolled_back().version());
  start_over();
  for (std::size_t i = 0; i < kept; ++i) train(before[i]);
}

void Replay::train(const proto::LogRecord::Committed& step) {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) train(rank, step);
  steps_.push_back(step);
}

void Replay::train(std::uint32_t rank, const proto::LogRecord::Committed& step) {
  State& state = ranks_[rank];
  std::vector<std::vector<float>> sum, one;
  for (const auto& tensor : model_.tensors()) {
    sum.emplace_back(tensor.count);
    one.emplace_back(tensor.count);
  }
  std::uint64_t weights = 0;
  for (const auto& member : step.members()) {
    const std::uint64_t weight = std::max<std::uint64_t>(1, member.weight());
    weights += weight;
    (void)model_.backward(rank, views_of(state.weights), views_of(one), membership::batch_of(member));
    for (std::size_t t = 0; t < sum.size(); ++t)
      for (std::size_t i = 0; i < sum[t].size(); ++i) sum[t][i] += one[t][i] * static_cast<float>(weight);
  }
  const float share = 1.0f / static_cast<float>(weights);
  for (std::uint32_t t = 0; t < sum.size(); ++t) {
    if (weights > 1)
      for (float& value : sum[t]) value *= share;
    model_.update(step.step(), t, state.weights[t], views_of(state.moments[t]), sum[t]);
  }
  remember(rank, step.step());
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
