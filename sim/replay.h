// The reference: one process that trains what the log says was trained, alone, and knows what every replica must hold.
// The model's gradients are sums of few bits, so that they add up to the same whatever the order. Where they travel
// coded they don't, and it goes by the ring's order (coded_ring.h); where what is coded depends on times, by what
// the first who applies a step has as its result.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "control.pb.h"
#include "sim/coded_ring.h"
#include "sim/debt.h"
#include "sim/model.h"

namespace rejoin::sim {

// How a job's gradients travel.
struct Travel {
  bool coded = false, follows_times = false;        // by some; … or not, as it comes
  std::uint64_t direct_bytes = 0;                   // buckets up to this size go as they are
  std::function<float(std::uint64_t step)> factor;  // how much this step counts, as its trainers tell
};

class Replay {
 public:
  Replay(const Model& model, std::uint32_t ranks, const Travel& travel);
  void on_record(const proto::LogRecord& record);
  void know_codings_of(const Replay& other) { coding_of_ = other.coding_of_; }
  // A process begins a step: as this member of the ring.
  void on_begun(std::uint32_t rank, std::uint64_t incarnation, const CodedRing::Member& member);
  // … has this result of the last step that was committed.
  void on_result(std::uint32_t rank, std::uint64_t step, const std::vector<BytesView>& buckets);
  // What a rank's state must be after this step; none: it is not known (any more).
  std::optional<std::uint64_t> digest(std::uint32_t rank, std::uint64_t version) const;
  // What has been lost for good.
  const std::optional<std::string>& lost() const { return lost_; }
  // Of a state, by tensor: the weights and their moments.
  static std::uint64_t digest_of(const Model::Views& weights, const std::vector<Model::Views>& moments);

 private:
  struct State {
    std::vector<std::vector<float>> weights;               // by tensor
    std::vector<std::vector<std::vector<float>>> moments;  // by tensor and number
    std::map<std::uint64_t, std::uint64_t> digests;        // by version
    CodedRing ring;
    std::vector<Debt> debts;  // by bucket
  };
  using Buckets = std::vector<std::vector<float>>;
  struct Step {  // that was committed
    proto::LogRecord::Committed record;
    std::vector<std::vector<CodedRing::Member>> rings;  // by rank: contributors first
    std::vector<std::optional<Buckets>> results;        // by rank, where it is not known without
  };
  struct Contributions {
    std::vector<Buckets> of;  // by contributor, in the ring's order, times its weight
    std::uint64_t weights = 0;
  };
  void start_over();
  void train(const Step& step, std::uint32_t rank);
  std::vector<float> result_of(const Step& step, std::uint32_t rank, std::uint32_t bucket, const Contributions& all);
  void remember(std::uint32_t rank, std::uint64_t version);
  bool waits(const Step& step, std::uint32_t rank) const {
    return travel_.follows_times && !step.results[rank].has_value();
  }

  const Model& model_;
  const Travel travel_;
  std::vector<State> ranks_;
  std::vector<Step> steps_;                                                         // that count, from the first
  std::vector<proto::Member> members_;                                              // of the epoch
  std::map<std::pair<std::uint32_t, std::uint64_t>, CodedRing::Member> coding_of_;  // by rank and incarnation
  std::optional<std::string> lost_;
};

}  // namespace rejoin::sim
