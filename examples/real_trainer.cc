// What a real trainer has beside its loop: AdamW with a schedule, clipping by the gradient's norm, metrics, evaluation,
// checkpoints. docs/real-trainer.md explains it step by step.
#include <fmt/format.h>
#include <rejoin/session.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <map>
#include <utility>

#include "base/command_line.h"
#include "examples/files.h"
#include "examples/model.h"
#include "examples/text.h"

using namespace rejoin;

namespace {

constexpr std::uint64_t kWarmup = 20, kLast = 400;
constexpr float kPeakRate = 3e-3f, kLargestNorm = 0.5f;
float clip_of(float norm) { return std::min(1.0f, kLargestNorm / norm); }

std::atomic<Session*> running = nullptr;
volatile std::sig_atomic_t came = 0;  // SIGTERM, SIGINT: the session's waiting ends, and train() with it

void on_signal(int number) {
  came = number;
  if (auto* session = running.load()) session->interrupt();
}

struct Settings {
  std::uint64_t every = 100;    // steps from one checkpoint and evaluation to the next
  std::uint32_t whole_job = 2;  // replicas with which the rate is whole
};

// A function of the step, and of what the decision on it says: a joiner is given both of the steps that it has missed.
// While fewer replicas contribute, the batch is smaller, and the rate with it.
float rate_at(std::uint64_t step, std::uint32_t contributors, std::uint32_t whole_job) {
  const auto s = static_cast<float>(std::min(step, kLast));
  const float full = static_cast<float>(std::min(contributors, whole_job)) / static_cast<float>(whole_job);
  if (step <= kWarmup) return full * kPeakRate * s / kWarmup;
  return full * kPeakRate * 0.5f * (1 + std::cos(3.14159265f * (s - kWarmup) / (kLast - kWarmup)));
}

Result<> train(Session& session, const SessionConfig& config, const std::string& text, const demo::Directory& directory,
               const Settings& settings) {
  const auto shape = demo::ModelShape::of_parameters(60000);
  std::vector<TensorId> tensors;
  for (std::uint32_t t = 0; t < demo::tensor_count; ++t) {
    const auto tensor = static_cast<demo::Tensor>(t);
    auto id = session.add({.name = demo::name_of(tensor), .count = demo::elements(shape, tensor), .moments = 2});
    if (!id) return tl::unexpected(id.error());
    tensors.push_back(*id);
  }
  // A metric is one more tensor: its "gradient" is what this replica has measured, and reduced the mean of all.
  const auto metric = session.add({.name = "metric.loss", .count = 1});
  if (!metric) return tl::unexpected(metric.error());
  auto all = tensors;
  all.push_back(*metric);
  const auto bucket = session.bucket(all);
  if (!bucket) return tl::unexpected(bucket.error());
  if (auto allocated = session.allocate(); !allocated) return allocated;

  demo::Views weights, gradients;
  std::vector<std::span<std::byte>> state;  // all that a checkpoint has: weights and moments
  for (auto id : tensors) {                 // value(): these tensors are declared
    weights.push_back(Session::as<float>(session.weight(id).value()));
    gradients.push_back(Session::as<float>(session.gradient(id).value()));
    state.insert(state.end(),
                 {session.weight(id).value(), session.moment(id, 0).value(), session.moment(id, 1).value()});
  }
  state.push_back(session.weight(*metric).value());
  const auto mean_loss = Session::as<float>(session.weight(*metric).value());
  const auto own_loss = Session::as<float>(session.gradient(*metric).value());
  mean_loss[0] = 0;
  demo::initialise(shape, weights, /*seed=*/1);
  const auto from = directory.restore(config.rank, state);  // fills them where there is a checkpoint
  if (!from) return tl::unexpected(from.error());
  if (auto joined = session.join(*from); !joined) return joined;

  std::map<std::uint64_t, float> norms;  // of the reduced gradients, by step
  session.when_reduced([&](std::uint64_t step) {
    double sum = 0;
    for (auto id : tensors)
      for (const float g : demo::floats(session.reduced(id).value())) sum += static_cast<double>(g) * g;
    norms[step] = static_cast<float>(std::sqrt(sum));
  });

  bool lost = false;  // a job is not ended for want of its metrics, but it is said
  const auto write_down = [&](const Session::Step& step, const std::string& what) {
    const auto written = directory.append_metric(config, step, what);
    if (!written && !std::exchange(lost, true))
      std::fprintf(stderr, "metrics from step %llu on are not all there: %s\n",
                   static_cast<unsigned long long>(step.number()), written.error().message.c_str());
  };
  const std::size_t held_out = text.size() / 10;  // the end of the text is never trained on
  for (;;) {
    auto begun = session.begin_step();
    if (!begun) return tl::unexpected(begun.error());
    if (!*begun) break;  // the job is finished
    const auto& step = **begun;
    if (step.contributes()) {
      const auto positions = demo::positions_of(step.batch(), text.size() - held_out);
      own_loss[0] =
          static_cast<float>(demo::forward_backward(shape, weights, gradients, text, positions, [](demo::Tensor) {}));
      if (auto reduced = session.all_reduce(*bucket); !reduced) return reduced;
    }
    float rate = 0;
    auto committed = session.commit([&](const Update& update) {
      rate = rate_at(update.step, update.contributors, settings.whole_job);
      if (update.tensor == *metric) {
        mean_loss[0] = update.gradient_as<float>()[0];
        return;
      }
      const auto part = [&](const Result<std::span<std::byte>>& column) {
        return update.of(Session::as<float>(column.value()));
      };
      std::vector<float> gradient(update.gradient_as<float>().begin(), update.gradient_as<float>().end());
      if (const float clip = clip_of(norms.at(update.step)); clip < 1)
        for (float& g : gradient) g *= clip;
      const demo::AdamW adamw{.rate = rate};
      adamw.apply(update.step, part(session.weight(update.tensor)), part(session.moment(update.tensor, 0)),
                  part(session.moment(update.tensor, 1)), gradient);
    });
    if (!committed) return committed;
    if (!step.contributes()) continue;  // its state is not complete before it contributes
    // So what coding (--coding) has lost of these gradients counts no more in the next step than they have in this one.
    if (auto told = session.scale_feedback(step.number(), clip_of(norms.at(step.number()))); !told) return told;
    norms.erase(norms.begin(), norms.find(step.number()));  // … and from then on it is given no earlier step's updates
    write_down(step, fmt::format("loss {:.4f} norm {:.4f} rate {:.6f}", mean_loss[0], norms.at(step.number()), rate));
    if (!step.leads() || step.number() % settings.every != 0) continue;
    // One replica does this for all, between two steps; the others wait for it in the next one. Where it fails, as on a
    // full disk, the next one that leads would fail alike, so nobody ends by it.
    const auto position = session.position();
    if (!position) return tl::unexpected(position.error());
    if (auto saved = directory.save(config.rank, *position, state); !saved)
      std::fprintf(stderr, "the checkpoint of step %llu is not written, and training goes on: %s\n",
                   static_cast<unsigned long long>(step.number()), saved.error().message.c_str());
    write_down(step, fmt::format("evaluated {:.4f}", demo::evaluate(shape, weights, text, held_out)));
  }
  const auto digest = session.state_digest();
  if (!digest) return tl::unexpected(digest.error());
  std::printf("finished, digest %016llx\n", static_cast<unsigned long long>(*digest));
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  SessionConfig config;
  std::string data, directory;
  Settings settings;
  CommandLine line("One rank of a trainer with a schedule, clipping, metrics, evaluation and checkpoints.");
  line.add("text", data, "what to learn").required();
  line.add("directory", directory, "for checkpoints and metrics; all ranks of all replicas share it").required();
  line.add("--every", settings.every, "steps from one checkpoint and evaluation to the next")
      .range(1, 1 << 30)
      .show_default();
  line.add("--whole-job", settings.whole_job, "replicas with which the learning rate is whole; with fewer it is less")
      .range(1, 1024)
      .show_default();
  config.bind(line);
  if (const auto status = line.parse(argc, argv)) return *status;
  const auto text = demo::read_text(data);
  if (!text) return std::fprintf(stderr, "%s\n", text.error().message.c_str()), 2;
  if (auto writable = demo::Directory(directory).check(config); !writable)  // before anybody waits for its state
    return std::fprintf(stderr, "%s\n", writable.error().message.c_str()), 2;
  auto session = Session::open(config);
  if (!session) return std::fprintf(stderr, "%s\n", session.error().message.c_str()), 2;
  running = session->get();
  std::signal(SIGTERM, on_signal);
  std::signal(SIGINT, on_signal);

  const auto trained = train(**session, config, *text, demo::Directory(directory), settings);
  const auto left = (*session)->leave();  // however it ended, nobody waits for this replica
  running = nullptr;
  if (came != 0)
    return std::fprintf(stderr, "interrupted; %s\n", left ? "this replica has left" : left.error().message.c_str()),
           128 + came;
  for (const auto& result : {trained, left})
    if (!result) {
      std::fprintf(stderr, "%s\n", result.error().message.c_str());
      const ErrorCode code = result.error().code;  // 3: to be started again; 2: that would not help
      return code == ErrorCode::cancelled ? 3 : code == ErrorCode::invalid_argument ? 2 : 1;
    }
  return 0;
}
