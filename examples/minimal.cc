// The smallest trainer: fits y = 3x with one weight. README.md explains it line by line.
#include <rejoin/session.h>

#include <cstdio>

int main() {
  auto config = rejoin::SessionConfig::from_environment();
  if (!config) return std::fprintf(stderr, "%s\n", config.error().message.c_str()), 2;
  auto opened = rejoin::Session::open(*config);
  if (!opened) return std::fprintf(stderr, "%s\n", opened.error().message.c_str()), 2;
  auto& session = **opened;

  auto w = session.add({.name = "w", .count = 1, .moments = 1});
  auto bucket = w ? session.bucket({*w}) : tl::unexpected(w.error());
  auto ready = bucket ? session.allocate() : tl::unexpected(bucket.error());
  if (ready) ready = session.join();
  if (!ready) return std::fprintf(stderr, "%s\n", ready.error().message.c_str()), 1;

  auto weight = rejoin::Session::as<float>(session.weight(*w));
  auto velocity = rejoin::Session::as<float>(session.moment(*w, 0));
  auto gradient = rejoin::Session::as<float>(session.gradient(*w));

  for (;;) {
    auto step = session.begin_step();
    if (!step) return std::fprintf(stderr, "%s\n", step.error().message.c_str()), 3;
    if (!*step) break;  // the job is finished
    if ((*step)->contributes()) {
      float sum = 0, count = 0;
      for (auto range : (*step)->batch())
        for (auto sample = range.begin; sample < range.end; ++sample, ++count) {
          const float x = static_cast<float>(sample % 7) - 3;
          sum += 2 * (weight[0] * x - 3 * x) * x;
        }
      gradient[0] = sum / count;
      if (auto reduced = session.all_reduce(*bucket); !reduced) return 3;
    }
    auto committed = session.commit([&](const rejoin::Piece& piece) {
      velocity[0] = 0.9f * velocity[0] + piece.gradient_as<float>()[0];
      weight[0] -= 0.01f * velocity[0];
    });
    if (!committed) return std::fprintf(stderr, "%s\n", committed.error().message.c_str()), 3;
  }
  const auto digest = session.state_digest();
  if (!digest) return std::fprintf(stderr, "%s\n", digest.error().message.c_str()), 1;
  std::printf("w = %.4f after step %llu, digest %016llx\n", weight[0],
              static_cast<unsigned long long>(session.version()), static_cast<unsigned long long>(*digest));
  return 0;
}
