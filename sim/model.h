// What the simulated trainers train. One object serves all of them; it holds no state of theirs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "membership/ledger.h"

namespace rejoin::sim {

struct TensorShape {
  std::uint64_t count = 0;
  std::uint32_t moments = 0, bucket = 0;
  bool elementwise = true;
};

inline std::span<float> floats(std::span<std::byte> bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

class Model {
 public:
  using Views = std::vector<std::span<float>>;  // by tensor
  virtual ~Model() = default;
  virtual const std::vector<TensorShape>& tensors() const = 0;
  virtual std::uint64_t gradient_log_budget() const = 0;  // bytes of gradients that a joiner may keep
  virtual std::size_t chunk_bytes() const = 0;            // of the all-reduce
  virtual void initialise(std::uint32_t rank, const Views& weights) const = 0;
  // Whether gradients add up to the same in any order, so that one process can tell what all must hold.
  virtual bool exact() const { return false; }
  // Overwrites the gradients with those of these samples; returns the mean loss.
  virtual double backward(std::uint32_t rank, const Views& weights, const Views& gradients,
                          const membership::Batch& batch) const = 0;
  // One optimizer step on a range of a tensor.
  virtual void update(std::uint64_t step, std::uint32_t tensor, std::span<float> weight, const Views& moments,
                      std::span<const float> gradient) const = 0;
};

// Small, of tensors of every sort, with gradients that any sample and any weight changes; it learns nothing.
const Model& noise_model();

}  // namespace rejoin::sim
