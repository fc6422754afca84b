// The trainer of the chaos runs: small, mostly asleep while it "computes", and after each step it says what lets the
// runner check the job without trusting it: what it trained, what the reduced gradients add up to, its state's digest.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>

#include "base/command_line.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "rejoin/session.h"

namespace {

using namespace rejoin;

struct Settings {
  SessionConfig session;
  std::uint64_t elements = 40000, tensors = 1, compute_ms = 40;
  std::string hold, log_level = "warn";
};

// A sample's gradient: small whole numbers, so that sums over samples are exact in any order, and so that the runner
// can say what they add up to (checker.py has the same function).
std::uint32_t value_of(std::uint64_t sample) { return static_cast<std::uint32_t>(sample * 2654435761ull) >> 28; }

void add_sample(std::uint64_t sample, std::span<float> gradient) {
  const auto base = static_cast<float>(value_of(sample));
  for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] += base + static_cast<float>(i % 16);
}

// Momentum; each element from its own gradient and moment alone.
void apply_update(std::span<float> weight, std::span<float> momentum, std::span<const float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    momentum[i] = 0.5f * momentum[i] + gradient[i];
    weight[i] = 0.999f * weight[i] - 0.001f * momentum[i];
  }
}

// Computing that costs the machine nothing. While the file `hold` is there it goes on: a trainer that hangs, in a
// process whose other threads are well.
void compute(const Settings& s) {
  do ::poll(nullptr, 0, static_cast<int>(s.compute_ms));
  while (!s.hold.empty() && std::filesystem::exists(s.hold));
}

int fail_with(const Error& error) {
  std::cerr << "trainer: " << error.message << "\n";
  return error.code == ErrorCode::cancelled ? 3 : 1;  // 3: to be started again
}

std::string text_of(const std::vector<SampleRange>& batch) {
  std::string text;
  for (const auto& range : batch) text += fmt::format("{}{}-{}", text.empty() ? "" : ",", range.begin, range.end);
  return text;
}

Result<> train(const Settings& s) {
  if (s.session.device != "host")
    return fail(ErrorCode::invalid_argument, "this trainer computes on the CPU: --device host (REJOIN_DEVICE)");
  auto opened = Session::open(s.session);
  if (!opened) return tl::unexpected(opened.error());
  Session& session = **opened;
  // Of two buckets the second is far smaller: it takes the path for short messages.
  std::vector<TensorId> tensors;
  std::vector<std::uint64_t> counts(s.tensors, s.elements);
  counts.push_back(16);
  for (const std::uint64_t count : counts) {
    auto tensor = session.add({.name = tensors.empty() || count == 16 ? fmt::format("t{}", count)
                                                                      : fmt::format("t{}.{}", tensors.size(), count),
                               .count = count,
                               .moments = 1});
    if (!tensor) return tl::unexpected(tensor.error());
    tensors.push_back(*tensor);
    if (auto bucket = session.bucket({*tensor}); !bucket) return tl::unexpected(bucket.error());
  }
  if (auto allocated = session.allocate(); !allocated) return allocated;
  if (auto joined = session.join(); !joined) return joined;
  for (;;) {
    auto begun = session.begin_step();
    if (!begun) return tl::unexpected(begun.error());
    if (!*begun) return {};
    const auto& step = **begun;
    if (step.contributes()) {
      events::emit("trained", {{"step", step.number()}, {"batch", text_of(step.batch())}});
      for (BucketId b = 0; b < tensors.size(); ++b) {
        const auto gradient = Session::as<float>(session.gradient(tensors[b]).value());
        std::fill(gradient.begin(), gradient.end(), 0.0f);
        for (const auto& range : step.batch())
          for (auto sample = range.begin; sample < range.end; ++sample) add_sample(sample, gradient);
        if (b == 0) compute(s);
        if (auto reduced = session.all_reduce(b); !reduced) return reduced;
      }
    }
    double sum = 0;
    auto committed = session.commit([&](const Update& update) {
      const auto gradient = update.gradient_as<float>();
      for (const float g : gradient) sum += g;
      apply_update(update.of(Session::as<float>(session.weight(update.tensor).value())),
                   update.of(Session::as<float>(session.moment(update.tensor, 0).value())), gradient);
    });
    if (!committed) return committed;
    if (!step.contributes()) {
      events::emit("followed", {{"step", step.number()}});
      continue;
    }
    const auto digest = session.state_digest();
    if (!digest) return tl::unexpected(digest.error());
    events::emit("applied", {{"step", step.number()}, {"sum", sum}, {"digest", fmt::format("{:016x}", *digest)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  CommandLine line("One rank of a chaos run's job; ./run chaos starts all of them.");
  s.session.bind(line);
  line.add("--elements", s.elements, "of the large tensor; a multiple of 16").show_default();
  line.add("--tensors", s.tensors, "so many large tensors").range(1, 1000).show_default();
  line.add("--compute-ms", s.compute_ms, "how long a step computes").show_default();
  line.add("--hold", s.hold, "computing does not end while this file exists");
  line.add("--log-level", s.log_level, "of this process").show_default();
  if (const auto status = line.parse(argc, argv)) return *status;
  const std::string who = fmt::format("r{}.{}", s.session.replica, s.session.rank);
  init_logging("trainer " + who, s.log_level);
  if (auto trained = train(s); !trained) return fail_with(trained.error());
  return 0;
}
