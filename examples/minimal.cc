// The smallest trainer: fits y = 3x with one weight. docs/trainer.md explains each call.
#include <rejoin/session.h>

#include <atomic>
#include <csignal>
#include <cstdio>

namespace {

std::atomic<rejoin::Session*> running = nullptr;
volatile std::sig_atomic_t came = 0;  // SIGTERM, SIGINT: the session's waiting ends, and train() with it

void on_signal(int number) {
  came = number;
  if (auto* session = running.load()) session->interrupt();
}

rejoin::Result<> train(rejoin::Session& session) {
  auto w = session.add({.name = "w", .count = 1, .moments = 1});
  if (!w) return tl::unexpected(w.error());
  auto bucket = session.bucket({*w});
  if (!bucket) return tl::unexpected(bucket.error());
  if (auto allocated = session.allocate(); !allocated) return allocated;
  const auto weight = rejoin::Session::as<float>(session.weight(*w).value());
  const auto velocity = rejoin::Session::as<float>(session.moment(*w, 0).value());
  const auto gradient = rejoin::Session::as<float>(session.gradient(*w).value());
  session.use_weights();
  if (auto joined = session.join(); !joined) return joined;

  for (;;) {
    auto step = session.begin_step();
    if (!step) return tl::unexpected(step.error());
    if (!*step) break;  // the job is finished
    if ((*step)->contributes()) {
      float sum = 0, count = 0;
      for (auto range : (*step)->batch())
        for (auto sample = range.begin; sample < range.end; ++sample, ++count) {
          const float x = static_cast<float>(sample % 7) - 3;
          sum += 2 * (weight[0] * x - 3 * x) * x;
        }
      gradient[0] = sum / count * static_cast<float>((*step)->weight());
      if (auto reduced = session.all_reduce(*bucket); !reduced) return reduced;
    }
    // While this replica catches up, an update is of any range of a tensor: only its elements are to be updated.
    auto committed = session.commit([&](const rejoin::Update& update) {
      const auto g = update.gradient_as<float>();
      const auto v = update.of(velocity), its_weight = update.of(weight);
      for (std::size_t i = 0; i < g.size(); ++i) {
        v[i] = 0.9f * v[i] + g[i];
        its_weight[i] -= 0.01f * v[i];
      }
    });
    if (!committed) return committed;
  }
  const auto version = session.version();
  if (!version) return {};  // it was still catching up
  const auto digest = session.state_digest();
  if (!digest) return tl::unexpected(digest.error());
  std::printf("w = %.4f after step %llu, digest %016llx\n", weight[0], static_cast<unsigned long long>(*version),
              static_cast<unsigned long long>(*digest));
  return {};
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) return std::fprintf(stderr, "no arguments are taken: settings come from REJOIN_* variables\n"), 2;
  auto config = rejoin::SessionConfig::from_environment();
  if (!config) return std::fprintf(stderr, "%s\n", config.error().message.c_str()), 2;
  if (config->device != "host")
    return std::fprintf(stderr, "this program computes on the CPU: REJOIN_DEVICE=host\n"), 2;
  auto opened = rejoin::Session::open(*config);
  if (!opened) return std::fprintf(stderr, "%s\n", opened.error().message.c_str()), 2;
  running = opened->get();
  std::signal(SIGTERM, on_signal);
  std::signal(SIGINT, on_signal);

  const auto trained = train(**opened);
  const auto left = (*opened)->leave();  // however it ended, nobody waits for this replica
  running = nullptr;
  if (came != 0)
    return std::fprintf(stderr, "interrupted; %s\n", left ? "this replica has left" : left.error().message.c_str()),
           128 + came;
  for (const auto& result : {trained, left})
    if (!result) {
      std::fprintf(stderr, "%s\n", result.error().message.c_str());
      const auto code = result.error().code;  // 3: to be started again, to catch up; 2: that would not help
      return code == rejoin::ErrorCode::cancelled ? 3 : code == rejoin::ErrorCode::invalid_argument ? 2 : 1;
    }
  return 0;
}
