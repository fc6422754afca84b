// The reference: one process that trains what the log says was trained, alone, and knows what every replica must hold.
// The model's gradients are sums of few bits, so that they add up to the same whatever the order.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "control.pb.h"
#include "sim/model.h"

namespace rejoin::sim {

class Replay {
 public:
  Replay(const Model& model, std::uint32_t ranks);
  void on_record(const proto::LogRecord& record);
  // What a rank's state must be after this step; none: it is not known (any more).
  std::optional<std::uint64_t> digest(std::uint32_t rank, std::uint64_t version) const;
  // Of a state, by tensor: the weights and their moments.
  static std::uint64_t digest_of(const Model::Views& weights, const std::vector<Model::Views>& moments);

 private:
  struct State {
    std::vector<std::vector<float>> weights;               // by tensor
    std::vector<std::vector<std::vector<float>>> moments;  // by tensor and number
    std::map<std::uint64_t, std::uint64_t> digests;        // by version
  };
  void start_over();
  void train(const proto::LogRecord::Committed& step);
  void train(std::uint32_t rank, const proto::LogRecord::Committed& step);
  void remember(std::uint32_t rank, std::uint64_t version);

  const Model& model_;
  std::vector<State> ranks_;
  std::vector<proto::LogRecord::Committed> steps_;  // that count, from the first
};

}  // namespace rejoin::sim
