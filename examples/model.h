// The demo's model: one tower of a byte-level language model, in plain C++. The last `kContext` bytes are embedded,
// go through one hidden layer (tanh) and a softmax over the next byte. Cross-entropy loss, AdamW.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace rejoin::demo {

constexpr std::uint32_t kContext = 16, kEmbedding = 16, kBytes = 256;

struct ModelShape {
  std::uint32_t hidden = 256;
  static ModelShape of_parameters(std::uint64_t wanted);  // the hidden size that comes nearest
  std::uint64_t parameters() const {
    return std::uint64_t{kBytes} * kEmbedding + std::uint64_t{kContext} * kEmbedding * hidden + hidden +
           std::uint64_t{hidden} * kBytes + kBytes;
  }
};

// The tensors, in the order of the forward pass.
enum Tensor : std::uint32_t { embedding, hidden_weight, hidden_bias, output_weight, output_bias, tensor_count };
std::uint64_t elements(const ModelShape& shape, Tensor tensor);
const char* name_of(Tensor tensor);

using Views = std::vector<std::span<float>>;  // by Tensor

void initialise(const ModelShape& shape, const Views& weights, std::uint64_t seed);

// Adds nothing: overwrites `gradients` with the mean over the samples. `ready` is called for each tensor as soon as its
// gradient is final, last layer first. Returns the mean loss in nats a byte. Each sample is a position in `text`.
double forward_backward(const ModelShape& shape, const Views& weights, const Views& gradients, std::string_view text,
                        std::span<const std::uint64_t> positions, const std::function<void(Tensor)>& ready);

struct AdamW {
  float rate = 2e-3f, beta1 = 0.9f, beta2 = 0.99f, epsilon = 1e-8f, decay = 1e-3f;
  // One step on a range of one tensor; elementwise.
  void apply(std::uint64_t step, std::span<float> weight, std::span<float> first, std::span<float> second,
             std::span<const float> gradient) const;
};

}  // namespace rejoin::demo
