#include "examples/model.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace rejoin::demo {

ModelShape ModelShape::of_parameters(std::uint64_t wanted) {
  const std::uint64_t fixed = std::uint64_t{kBytes} * kEmbedding + kBytes;
  const std::uint64_t per_unit = std::uint64_t{kContext} * kEmbedding + 1 + kBytes;
  return {static_cast<std::uint32_t>(std::max<std::uint64_t>(8, wanted > fixed ? (wanted - fixed) / per_unit : 8))};
}

std::uint64_t elements(const ModelShape& shape, Tensor tensor) {
  switch (tensor) {
    case embedding: return std::uint64_t{kBytes} * kEmbedding;
    case hidden_weight: return std::uint64_t{shape.hidden} * kContext * kEmbedding;
    case hidden_bias: return shape.hidden;
    case output_weight: return std::uint64_t{kBytes} * shape.hidden;
    case output_bias: return kBytes;
    case tensor_count: break;
  }
  return 0;
}

const char* name_of(Tensor tensor) {
  constexpr const char* names[] = {"embedding", "hidden.weight", "hidden.bias", "output.weight", "output.bias"};
  return names[tensor];
}

void initialise(const ModelShape& shape, const Views& weights, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto fill = [&](Tensor t, float scale) {
    for (auto& w : weights[t]) w = scale * (static_cast<float>(random() >> 40) / static_cast<float>(1 << 23) - 1.0f);
  };
  fill(embedding, 0.5f);
  fill(hidden_weight, 1.0f / std::sqrt(static_cast<float>(kContext * kEmbedding)));
  fill(hidden_bias, 0.0f);
  fill(output_weight, 1.0f / std::sqrt(static_cast<float>(shape.hidden)));
  fill(output_bias, 0.0f);
}

double forward_backward(const ModelShape& shape, const Views& w, const Views& g, std::string_view text,
                        std::span<const std::uint64_t> positions, const std::function<void(Tensor)>& ready) {
  constexpr std::uint32_t inputs = kContext * kEmbedding;
  const std::uint32_t hidden = shape.hidden;
  const std::size_t samples = positions.size();
  const float scale = 1.0f / static_cast<float>(samples);
  std::vector<float> x(samples * inputs), h(samples * hidden), delta(samples * kBytes), dh(samples * hidden);
  for (auto& tensor : g) std::fill(tensor.begin(), tensor.end(), 0.0f);
  const auto byte_at = [&](std::uint64_t position) { return static_cast<unsigned char>(text[position % text.size()]); };

  double loss = 0;
  for (std::size_t s = 0; s < samples; ++s) {
    float* xs = &x[s * inputs];
    for (std::uint32_t c = 0; c < kContext; ++c)
      std::copy_n(&w[embedding][std::size_t{byte_at(positions[s] + c)} * kEmbedding], kEmbedding, xs + c * kEmbedding);
    float* hs = &h[s * hidden];
    for (std::uint32_t j = 0; j < hidden; ++j) {
      const float* row = &w[hidden_weight][std::size_t{j} * inputs];
      float sum = w[hidden_bias][j];
      for (std::uint32_t i = 0; i < inputs; ++i) sum += row[i] * xs[i];
      hs[j] = std::tanh(sum);
    }
    float* ds = &delta[s * kBytes];
    float largest = -1e30f;
    for (std::uint32_t k = 0; k < kBytes; ++k) {
      const float* row = &w[output_weight][std::size_t{k} * hidden];
      float sum = w[output_bias][k];
      for (std::uint32_t j = 0; j < hidden; ++j) sum += row[j] * hs[j];
      ds[k] = sum;
      largest = std::max(largest, sum);
    }
    float total = 0;
    for (std::uint32_t k = 0; k < kBytes; ++k) total += ds[k] = std::exp(ds[k] - largest);
    const unsigned char target = byte_at(positions[s] + kContext);
    loss -= std::log(std::max(ds[target] / total, 1e-30f));
    for (std::uint32_t k = 0; k < kBytes; ++k) ds[k] = ds[k] / total * scale;
    ds[target] -= scale;
  }
  // Last layer first, so that its gradients travel while the rest is computed.
  for (std::size_t s = 0; s < samples; ++s) {
    const float* hs = &h[s * hidden];
    float* back = &dh[s * hidden];
    for (std::uint32_t k = 0; k < kBytes; ++k) {
      const float d = delta[s * kBytes + k];
      float* row = &g[output_weight][std::size_t{k} * hidden];
      const float* weight = &w[output_weight][std::size_t{k} * hidden];
      for (std::uint32_t j = 0; j < hidden; ++j) row[j] += d * hs[j];
      for (std::uint32_t j = 0; j < hidden; ++j) back[j] += d * weight[j];
      g[output_bias][k] += d;
    }
  }
  ready(output_bias);
  ready(output_weight);
  for (std::size_t s = 0; s < samples; ++s) {
    const float* xs = &x[s * inputs];
    std::vector<float> dx(inputs);
    for (std::uint32_t j = 0; j < hidden; ++j) {
      const float hs = h[s * hidden + j];
      const float d = dh[s * hidden + j] * (1 - hs * hs);
      float* row = &g[hidden_weight][std::size_t{j} * inputs];
      const float* weight = &w[hidden_weight][std::size_t{j} * inputs];
      for (std::uint32_t i = 0; i < inputs; ++i) row[i] += d * xs[i];
      for (std::uint32_t i = 0; i < inputs; ++i) dx[i] += d * weight[i];
      g[hidden_bias][j] += d;
    }
    for (std::uint32_t c = 0; c < kContext; ++c) {
      float* row = &g[embedding][std::size_t{byte_at(positions[s] + c)} * kEmbedding];
      for (std::uint32_t i = 0; i < kEmbedding; ++i) row[i] += dx[c * kEmbedding + i];
    }
  }
  ready(hidden_bias);
  ready(hidden_weight);
  ready(embedding);
  return loss / static_cast<double>(samples);
}

}  // namespace rejoin::demo
