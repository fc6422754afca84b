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

namespace {

// Rows go by four, so that what they are added to or multiplied with is read once for the four.
constexpr std::uint32_t kRows = 4;

// sum[i] += Σ factors[r * stride] * rows[r][i]: `count` rows of `width` each, which lie one behind the other.
void add_rows(float* __restrict sum, std::uint32_t width, const float* __restrict rows, std::uint32_t count,
              const float* __restrict factors, std::size_t stride) {
  std::uint32_t r = 0;
  for (; r + kRows <= count; r += kRows, rows += kRows * std::size_t{width}) {
    const float* of = factors + r * stride;
    const float f0 = of[0], f1 = of[stride], f2 = of[2 * stride], f3 = of[3 * stride];
    for (std::size_t i = 0; i < width; ++i)
      sum[i] += f0 * rows[i] + f1 * rows[width + i] + f2 * rows[2 * width + i] + f3 * rows[3 * width + i];
  }
  for (; r < count; ++r, rows += width)
    for (std::size_t i = 0; i < width; ++i) sum[i] += factors[r * stride] * rows[i];
}

// products[r] += rows[r] · x
void multiply_rows(float* __restrict products, std::uint32_t width, const float* __restrict rows, std::uint32_t count,
                   const float* __restrict x) {
  std::uint32_t r = 0;
  for (; r + kRows <= count; r += kRows, rows += kRows * std::size_t{width}) {
    float p0 = 0, p1 = 0, p2 = 0, p3 = 0;
    for (std::size_t i = 0; i < width; ++i) {
      p0 += rows[i] * x[i];
      p1 += rows[width + i] * x[i];
      p2 += rows[2 * width + i] * x[i];
      p3 += rows[3 * width + i] * x[i];
    }
    products[r] += p0, products[r + 1] += p1, products[r + 2] += p2, products[r + 3] += p3;
  }
  for (; r < count; ++r, rows += width)
    for (std::size_t i = 0; i < width; ++i) products[r] += rows[i] * x[i];
}

}  // namespace

double forward_backward(const ModelShape& shape, const Views& w, const Views& g, std::string_view text,
                        std::span<const std::uint64_t> positions, const std::function<void(Tensor)>& ready) {
  constexpr std::uint32_t inputs = kContext * kEmbedding;
  const std::uint32_t hidden = shape.hidden;
  const auto samples = static_cast<std::uint32_t>(positions.size());
  const float scale = 1.0f / static_cast<float>(samples);
  std::vector<float> x(positions.size() * inputs), h(positions.size() * hidden), delta(positions.size() * kBytes),
      dh(h.size());
  for (auto& tensor : g) std::fill(tensor.begin(), tensor.end(), 0.0f);
  const auto byte_at = [&](std::uint64_t position) { return static_cast<unsigned char>(text[position % text.size()]); };

  double loss = 0;
  for (std::size_t s = 0; s < samples; ++s) {
    float* xs = &x[s * inputs];
    for (std::uint32_t c = 0; c < kContext; ++c)
      std::copy_n(&w[embedding][std::size_t{byte_at(positions[s] + c)} * kEmbedding], kEmbedding, xs + c * kEmbedding);
    float* hs = &h[s * hidden];
    std::copy_n(w[hidden_bias].data(), hidden, hs);
    multiply_rows(hs, inputs, w[hidden_weight].data(), hidden, xs);
    for (std::uint32_t j = 0; j < hidden; ++j) hs[j] = std::tanh(hs[j]);
    float* ds = &delta[s * kBytes];
    std::copy_n(w[output_bias].data(), kBytes, ds);
    multiply_rows(ds, hidden, w[output_weight].data(), kBytes, hs);
    const float largest = *std::max_element(ds, ds + kBytes);
    float total = 0;
    for (std::uint32_t k = 0; k < kBytes; ++k) total += ds[k] = std::exp(ds[k] - largest);
    const unsigned char target = byte_at(positions[s] + kContext);
    loss -= std::log(std::max(ds[target] / total, 1e-30f));
    for (std::uint32_t k = 0; k < kBytes; ++k) ds[k] = ds[k] / total * scale;
    ds[target] -= scale;
  }
  // Last layer first, so that its gradients travel while the rest is computed.
  for (std::uint32_t k = 0; k < kBytes; ++k)
    add_rows(&g[output_weight][std::size_t{k} * hidden], hidden, h.data(), samples, &delta[k], kBytes);
  for (std::size_t s = 0; s < samples; ++s)
    for (std::uint32_t k = 0; k < kBytes; ++k) g[output_bias][k] += delta[s * kBytes + k];
  ready(output_bias);
  ready(output_weight);
  for (std::size_t s = 0; s < samples; ++s) {
    add_rows(&dh[s * hidden], hidden, w[output_weight].data(), kBytes, &delta[s * kBytes], 1);
    for (std::uint32_t j = 0; j < hidden; ++j) {
      const float hs = h[s * hidden + j];
      g[hidden_bias][j] += dh[s * hidden + j] *= 1 - hs * hs;
    }
    std::vector<float> dx(inputs);
    add_rows(dx.data(), inputs, w[hidden_weight].data(), hidden, &dh[s * hidden], 1);
    for (std::uint32_t c = 0; c < kContext; ++c) {
      float* row = &g[embedding][std::size_t{byte_at(positions[s] + c)} * kEmbedding];
      for (std::uint32_t i = 0; i < kEmbedding; ++i) row[i] += dx[c * kEmbedding + i];
    }
  }
  for (std::uint32_t j = 0; j < hidden; ++j)
    add_rows(&g[hidden_weight][std::size_t{j} * inputs], inputs, x.data(), samples, &dh[j], hidden);
  ready(hidden_bias);
  ready(hidden_weight);
  ready(embedding);
  return loss / static_cast<double>(samples);
}

}  // namespace rejoin::demo
