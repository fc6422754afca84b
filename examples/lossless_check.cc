// rejoin-lossless-check: the demo's model, trained by the simulated cluster (sim/) once with failures and once without,
// over as many samples in the same order. Writes both loss curves. While it runs, the simulator's checkers watch that
// replicas are the same to the bit and that every sample is trained once.
#include <fmt/format.h>

#include <fstream>
#include <iostream>
#include <numeric>

#include "base/command_line.h"
#include "base/log.h"
#include "examples/model.h"
#include "examples/text.h"
#include "sim/world.h"

namespace {

using namespace rejoin;

class DemoModel final : public sim::Model {
 public:
  DemoModel(std::string text, std::uint64_t parameters)
      : text_(std::move(text)), shape_(demo::ModelShape::of_parameters(parameters)) {
    for (std::uint32_t t = 0; t < demo::tensor_count; ++t)
      tensors_.push_back({.count = demo::elements(shape_, static_cast<demo::Tensor>(t)),
                          .moments = 2,
                          .bucket = t == demo::output_weight || t == demo::output_bias ? 0u : 1u,
                          .elementwise = true});
  }
  const std::vector<sim::TensorShape>& tensors() const override { return tensors_; }
  std::uint64_t gradient_log_budget() const override { return 2 * shape_.parameters() * sizeof(float); }
  std::size_t chunk_bytes() const override { return 64 << 10; }
  void initialise(std::uint32_t rank, const Views& weights) const override {
    demo::initialise(shape_, weights, 1000 + rank);
  }
  double backward(std::uint32_t, const Views& weights, const Views& gradients,
                  const membership::Batch& batch) const override {
    std::vector<std::uint64_t> positions;
    for (const auto& range : batch)
      for (auto sample = range.begin; sample < range.end; ++sample)
        positions.push_back(demo::position_of(sample, text_.size()));
    return demo::forward_backward(shape_, weights, gradients, text_, positions, [](demo::Tensor) {});
  }
  void update(std::uint64_t step, std::uint32_t, std::span<float> weight, const Views& moments,
              std::span<const float> gradient) const override {
    adamw_.apply(step, weight, moments[0], moments[1], gradient);
  }

 private:
  const std::string text_;
  const demo::ModelShape shape_;
  const demo::AdamW adamw_;
  std::vector<sim::TensorShape> tensors_;
};

// The mean loss of each stretch of samples, of so many.
std::vector<double> smoothed(const sim::Outcome& outcome, std::uint64_t samples, std::size_t points) {
  std::vector<double> sum(points), weight(points);
  std::uint64_t before = 0;
  for (const auto& step : outcome.committed) {
    const auto at = std::min<std::size_t>(points - 1, before * points / samples);
    const auto count = static_cast<double>(step.samples - before);
    sum[at] += step.loss * count;
    weight[at] += count;
    before = step.samples;
  }
  for (std::size_t i = 0; i < points; ++i) sum[i] /= std::max(1.0, weight[i]);
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  std::string data, out;
  std::uint64_t failures = 1000, parameters = 20000;
  sim::Options options{.seed = 1, .replicas = 3, .ranks = 1, .batch = 16, .faults = {}};
  CommandLine line(
      "Trains the demo's model in the simulated cluster with failures and without, over the same samples, and compares "
      "the losses.");
  line.add("--data", data, "text to learn").required();
  line.add("--failures", failures, "each comes when all replicas contribute").show_default();
  line.add("--params", parameters, "parameters of the model").show_default();
  line.add("--replicas", options.replicas, "of the job").range(2, 16).show_default();
  line.add("--seed", options.seed, "of weights and failures").show_default();
  line.add("--out", out, "file for the curves: samples, loss without failures, loss with them");
  if (const auto status = line.parse(argc, argv)) return *status;
  init_logging("lossless-check", "off");
  auto text = demo::read_text(data);
  if (!text) return std::cerr << "rejoin-lossless-check: --data " << text.error().message << "\n", 2;
  const DemoModel model(std::move(*text), parameters);
  options.model = &model;
  const auto run = [&](sim::Options::Long how_long) {
    options.run_for = how_long;
    sim::Outcome outcome = sim::play(options);
    if (outcome.violation)
      std::cerr << "rejoin-lossless-check: " << outcome.violation->invariant << ": " << outcome.violation->what << "\n";
    return outcome;
  };
  const sim::Outcome with = run({.failures = failures, .samples = 50000});
  if (with.violation || with.committed.empty()) return 1;
  const std::uint64_t samples = with.committed.back().samples;
  const sim::Outcome without = run({.failures = 0, .samples = samples});
  if (without.violation || without.committed.empty()) return 1;

  const std::size_t points = std::clamp<std::size_t>(samples / 2000, 10, 400);
  const auto a = smoothed(without, samples, points), b = smoothed(with, samples, points);
  if (!out.empty()) {
    std::ofstream curves(out);
    for (std::size_t i = 0; i < points; ++i)
      curves << (i * samples + samples / 2) / points << "\t" << a[i] << "\t" << b[i] << "\n";
    if (!curves.flush()) return std::cerr << "rejoin-lossless-check: can't write " << out << "\n", 2;
  }
  const std::size_t tail = std::max<std::size_t>(1, points / 10);
  const auto end_of = [&](const std::vector<double>& curve) {
    return std::accumulate(curve.end() - static_cast<std::ptrdiff_t>(tail), curve.end(), 0.0) /
           static_cast<double>(tail);
  };
  const double difference = end_of(b) / end_of(a) - 1;
  fmt::print(
      "without failures: {} steps, {} samples, {:.1f} virtual seconds, loss {:.3f} at first, {:.4f} over the last "
      "tenth\nwith {} failures: {} steps, {} samples, {:.1f} virtual seconds, loss {:.4f} over the last tenth "
      "({:+.2f} %)\n",
      without.committed.size(), without.committed.back().samples, without.virtual_seconds, a.front(), end_of(a),
      failures, with.committed.size(), samples, with.virtual_seconds, end_of(b), 100 * difference);
  return std::abs(difference) < 0.05 && end_of(b) < 0.8 * b.front() ? 0 : 1;
}
