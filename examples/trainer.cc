// The demo's trainer: one rank of one replica, training its tower of the model.
#include <fmt/format.h>
#include <poll.h>

#include <iostream>

#include "base/command_line.h"
#include "base/events.h"
#include "base/log.h"
#include "examples/interrupt.h"
#include "examples/pool.h"
#include "examples/tensors.h"
#include "examples/text.h"
#include "rejoin/session.h"

namespace {

using namespace rejoin;

struct Settings {
  SessionConfig session;
  std::string data, log_level = "warn";
  std::string state = "session";  // who allocates weights, moments and gradients
  std::uint64_t seed = 1, parameters = 300000;
  std::uint64_t digest_every = 0;  // steps; 0: only at the end
  std::uint64_t pause_at = 0;      // in mid-step, say so and wait to be killed or stopped
  std::uint64_t drift_from = 0;    // step; from there on the optimizer computes something else
};

int fail_with(const Error& error) {
  std::cerr << "trainer: " << error.message << "\n";
  // 3: to be started again; 2: that would not help
  return error.code == ErrorCode::cancelled ? 3 : error.code == ErrorCode::invalid_argument ? 2 : 1;
}

// However it ends, nobody is to wait for this replica.
int leave_with(Session& session, const std::optional<Error>& error) {
  const auto left = session.leave();
  if (demo::interrupted() != 0) {
    std::cerr << "trainer: interrupted after step " << session.committed() << "; "
              << (left ? "this replica has left" : left.error().message) << "\n";
    return 128 + demo::interrupted();
  }
  if (error) return fail_with(*error);
  return left ? 0 : fail_with(left.error());
}

// Room for all tensors, where it is not the session that allocates them.
Result<std::optional<demo::Pool>> make_pool(const Settings& s, const demo::ModelShape& shape) {
  if (s.state == "session") return std::optional<demo::Pool>{};
  std::size_t bytes = 0;
  for (std::uint32_t t = 0; t < demo::tensor_count; ++t)
    bytes += 4 * demo::Pool::room(demo::elements(shape, static_cast<demo::Tensor>(t)) * sizeof(float));
  auto device = device::open_device(s.session.device);
  if (!device) return tl::unexpected(device.error());
  return demo::Pool::make(**device, s.state == "expandable", bytes).map([](demo::Pool&& pool) {
    return std::optional(std::move(pool));
  });
}

int train(const Settings& s) {
  const auto loaded = demo::read_text(s.data);
  if (!loaded) {
    std::cerr << "trainer: --data " << loaded.error().message << "\n";
    return 2;
  }
  const std::string& text = *loaded;
  const auto shape = demo::ModelShape::of_parameters(s.parameters);
  auto pool = make_pool(s, shape);  // outlives the session
  if (!pool) return fail_with(pool.error());
  auto opened = Session::open(s.session);
  if (!opened) return fail_with(opened.error());
  Session& session = **opened;
  const demo::Interruptible interruptible(session);
  const auto fail_with = [&](const Error& error) { return leave_with(session, error); };

  // The last layer's gradients are ready first: a bucket for it, one for the rest.
  std::vector<TensorId> ids(demo::tensor_count);
  for (std::uint32_t t = 0; t < demo::tensor_count; ++t) {
    const TensorSpec spec{.name = demo::name_of(static_cast<demo::Tensor>(t)),
                          .count = demo::elements(shape, static_cast<demo::Tensor>(t)),
                          .moments = 2};
    std::vector<std::span<std::byte>> memory;
    for (std::uint32_t column = 0; *pool && column < 3; ++column)
      memory.push_back((*pool)->take(spec.count * sizeof(float)));
    auto id = *pool ? session.add(spec, memory) : session.add(spec);
    if (!id) return fail_with(id.error());
    ids[t] = *id;
  }
  const std::vector<TensorId> buckets[] = {{ids[demo::output_weight], ids[demo::output_bias]},
                                           {ids[demo::embedding], ids[demo::hidden_weight], ids[demo::hidden_bias]}};
  for (const auto& bucket : buckets) {
    std::size_t bytes = 0;
    for (auto id : bucket) bytes += demo::elements(shape, static_cast<demo::Tensor>(id.index)) * sizeof(float);
    auto made = *pool ? session.bucket(bucket, (*pool)->take(bytes)) : session.bucket(bucket);
    if (!made) return fail_with(made.error());
  }
  if (auto allocated = session.allocate(); !allocated) return fail_with(allocated.error());

  auto made = demo::Tensors::make(session, s.session.device, ids);
  if (!made) return fail_with(made.error());
  demo::Tensors& tensors = **made;
  demo::initialise(shape, tensors.weights(), s.seed * 1000 + s.session.rank);
  if (auto put = tensors.put_weights(); !put) return fail_with(put.error());
  if (auto joined = session.join(); !joined) return fail_with(joined.error());

  const auto emit_digest = [&]() -> Result<> {
    const auto version = session.version();
    if (!version) return {};  // it is still catching up
    const auto digest = session.state_digest();
    if (!digest) return tl::unexpected(digest.error());
    events::emit("digest", {{"version", *version}, {"digest", fmt::format("{:016x}", *digest)}});
    return {};
  };
  const demo::AdamW adamw;
  double loss = 0;
  for (;;) {
    auto begun = session.begin_step();
    if (!begun) return fail_with(begun.error());
    if (!*begun) break;
    const auto& step = **begun;
    if (step.contributes()) {
      std::vector<std::uint64_t> positions;
      for (const auto& range : step.batch())
        for (auto sample = range.begin; sample < range.end; ++sample)
          positions.push_back(demo::position_of(sample, text.size()));
      Result<> reduced = tensors.get_weights();
      if (!reduced) return fail_with(reduced.error());
      loss = demo::forward_backward(shape, tensors.weights(), tensors.gradients(), text, positions,
                                    [&](demo::Tensor ready) {
                                      if (ready == demo::output_weight && reduced) {
                                        reduced = tensors.all_reduce(0, buckets[0]);
                                        if (s.pause_at == step.number()) {
                                          events::emit("paused", {{"step", step.number()}});
                                          while (demo::interrupted() == 0) ::poll(nullptr, 0, 100);
                                        }
                                      }
                                      if (ready == demo::embedding && reduced)
                                        reduced = tensors.all_reduce(1, buckets[1]);
                                    });
      if (!reduced) return fail_with(reduced.error());
      if (auto read = tensors.read_behind_buckets(); !read) return fail_with(read.error());
    }
    auto committed = tensors.commit([&](const Update& update, const demo::Views& of) {
      adamw.apply(update.step, of[0], of[1], of[2], update.gradient_as<float>());
      if (s.drift_from > 0 && update.step >= s.drift_from && update.tensor.index == demo::hidden_weight)
        of[0].front() += 1e-6f;
    });
    if (!committed) return fail_with(committed.error());
    if (session.committed() < step.number()) continue;  // to be contributed to, now that nobody else is left
    events::emit(
        "progress",
        {{"step", step.number()}, {"loss", step.contributes() ? loss : -1.0}, {"contributes", step.contributes()}});
    if (s.digest_every > 0 && step.number() % s.digest_every == 0 && step.contributes())
      if (auto emitted = emit_digest(); !emitted) return fail_with(emitted.error());
  }
  if (auto emitted = emit_digest(); !emitted) return fail_with(emitted.error());
  return leave_with(session, std::nullopt);
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  rejoin::CommandLine line("One rank of the demo's training job; rejoin-demo starts all of them.");
  s.session.bind(line);
  line.add("--data", s.data, "text to learn").required();
  line.add("--state", s.state, "who allocates the tensors: session; pool or expandable, as a framework would")
      .one_of({"session", "pool", "expandable"})
      .show_default();
  line.add("--seed", s.seed, "seed of the initial weights").show_default();
  line.add("--params", s.parameters, "parameters of this rank's tower").show_default();
  line.add("--digest-every", s.digest_every, "tell the state's digest every so many steps; 0: at the end")
      .show_default();
  line.add("--pause-at", s.pause_at, "in the middle of this step, wait for a signal");
  line.add("--drift-from", s.drift_from,
           "from this step on the optimizer computes something else than on other replicas, for the audit to find");
  line.add("--log-level", s.log_level, "of this process")
      .one_of({rejoin::kLogLevels.begin(), rejoin::kLogLevels.end()})
      .show_default();
  if (const auto status = line.parse(argc, argv)) return *status;
  const std::string who = fmt::format("r{}.{}", s.session.replica, s.session.rank);
  rejoin::init_logging("trainer " + who, s.log_level);
  demo::catch_interrupts();
  return train(s);
}
