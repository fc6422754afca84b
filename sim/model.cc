#include "sim/model.h"

#include <algorithm>
#include <cmath>

namespace rejoin::sim {

namespace {

float noise(std::uint64_t a, std::uint64_t b) {
  auto x = static_cast<std::uint32_t>(a * 0x9e3779b97f4a7c15 >> 32) + static_cast<std::uint32_t>(b) * 0x9e3779b9;
  x = (x ^ (x >> 15)) * 0x85ebca6b;
  return static_cast<float>(static_cast<std::int32_t>((x ^ (x >> 13)) & 0xffff)) / 65536.0f - 0.5f;
}

class NoiseModel final : public Model {
 public:
  const std::vector<TensorShape>& tensors() const override { return tensors_; }
  std::uint64_t gradient_log_budget() const override { return 3200; }  // two steps of the largest tensor, and no more
  std::size_t chunk_bytes() const override { return 512; }

  void initialise(std::uint32_t rank, const Views& weights) const override {
    for (std::size_t t = 0; t < weights.size(); ++t)
      for (std::size_t i = 0; i < weights[t].size(); ++i) weights[t][i] = noise(rank * 1000 + t, i);
  }

  // All terms are multiples of 2⁻¹⁶ below 1: sums of hundreds of them have no rounding.
  bool exact() const override { return true; }

  double backward(std::uint32_t rank, const Views& weights, const Views& gradients,
                  const membership::Batch& batch) const override {
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      const auto gradient = gradients[t];
      for (std::size_t i = 0; i < gradient.size(); ++i)
        gradient[i] = std::nearbyint(std::clamp(weights[t][i], -8.0f, 8.0f) * 4096.0f) / 65536.0f;
      for (const auto& range : batch)
        for (std::uint64_t sample = range.begin; sample < range.end; ++sample)
          for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] += noise(sample * 64 + t, i * 8 + rank);
    }
    return 0;
  }

  void update(std::uint64_t, std::uint32_t, std::span<float> weight, const Views& moments,
              std::span<const float> gradient) const override {
    for (std::size_t i = 0; i < weight.size(); ++i) {
      float change = gradient[i];
      for (std::size_t m = 0; m < moments.size(); ++m) {
        float& moment = moments[m][i];
        moment = 0.9f * moment + 0.1f * (m == 0 ? change : change * change);
        change = m == 0 ? moment : change / (1.0f + moment);
      }
      weight[i] -= 0.05f * change;
    }
  }

 private:
  const std::vector<TensorShape> tensors_{{300, 1, 0, true}, {17, 0, 0, true},  {150, 2, 1, true},
                                          {64, 1, 1, false}, {400, 1, 2, true}, {33, 3, 2, false}};
};

}  // namespace

const Model& noise_model() {
  static const NoiseModel model;
  return model;
}

}  // namespace rejoin::sim
