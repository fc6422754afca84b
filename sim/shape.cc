#include "sim/shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "sim/random.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr std::array<Duration, 4> kSlowest{20us, 50us, 200us, 2ms};
constexpr std::array<Duration, 3> kDetection{100us, 1ms, 20ms};
constexpr std::array<std::uint32_t, 4> kReplicas{2, 3, 4, 5};
constexpr std::uint32_t kMoreReplicas = 3;  // where not all are connected with each other
constexpr std::array<std::optional<std::uint32_t>, 8> kFullMesh{
    std::nullopt, std::nullopt, std::nullopt, std::nullopt, 0, 1, 2, 4};
constexpr std::array<std::uint32_t, 3> kSpares{0, 1, 2};
constexpr std::array<std::uint32_t, 3> kRanks{1, 2, 3};
constexpr std::array<std::uint64_t, 3> kCheckpointSteps{0, 1, 10};
constexpr std::uint64_t kFewestSteps = 3, kFewSteps = 20, kManySteps = 120;  // of jobs that end
constexpr std::array<std::uint32_t, 8> kRelays{0, 0, 0, 0, 0, 1, 2, 3};
constexpr std::array<Codings, 8> kCodingsDrawn{Codings::off,   Codings::off,  Codings::off,       Codings::off,
                                               Codings::eight, Codings::four, Codings::automatic, Codings::mixed};
constexpr std::array<std::string_view, kCodings> kCodingsNames{"off", "8", "4", "auto", "mixed"};

template <typename T, std::size_t N>
T one_of(const std::array<T, N>& values, std::uint64_t seed, std::string_view dimension) {
  return values[Random(seed, dimension).pick(N)];
}

}  // namespace

Shape Shape::of(std::uint64_t seed) {
  const auto often = [&](std::string_view dimension, std::uint64_t one_in) {
    return Random(seed, dimension).one_in(one_in);
  };
  const std::uint64_t steps = kFewestSteps + Random(seed, "steps").pick(often("few steps", 2) ? kFewSteps : kManySteps);
  const LinkRule links{.full_mesh_members = one_of(kFullMesh, seed, "full mesh"),
                       .spares = one_of(kSpares, seed, "spares")};
  return {.replicas = one_of(kReplicas, seed, "replicas") + (links.full_mesh_members ? kMoreReplicas : 0),
          .ranks = one_of(kRanks, seed, "ranks"),
          .nodes = often("nodes", 3) ? 2u : 1u,
          .slowest = one_of(kSlowest, seed, "network"),
          .detection = one_of(kDetection, seed, "detection"),
          .viewable = often("viewable memory", 3),
          .late_writes = often("late writes", 2),
          .lands_stopped = often("lands while stopped", 2),
          .rails = often("rails", 3) ? 2u : 1u,
          .direct = often("direct", 2),
          .doubling = often("doubling", 2),
          .links = links,
          .slow_streams = often("slow streams", 3),
          .checkpoint_steps = one_of(kCheckpointSteps, seed, "checkpoints"),
          .evaluates = often("evaluations", 3),
          .long_updates = often("long updates", 3),
          .coordinators = often("coordinators", 3) ? 3u : 1u,
          .relays = one_of(kRelays, seed, "relays"),
          .constant_batch = often("constant batch", 3),
          .upgrade = often("upgrade", 3),
          .balance = often("balance", 3),
          .located = often("located", 3),
          .measured = often("measured", 2),
          .codings = one_of(kCodingsDrawn, seed, "codings"),
          .clips = often("clips", 2),
          .stages = often("stages", 3),
          .steps = often("ends", 6) ? steps : 0,
          .old = often("old", 3)};
}

float Shape::factor(std::uint64_t step) const {
  constexpr std::array<float, 6> factors{1, 1, 0.25f, 1e-12f, 1.5f, 0};
  return clips ? factors[Random(step, "how much a step counts").pick(factors.size())] : 1;
}

std::map<std::string, std::string> Shape::values() const {
  const std::uint32_t more = links.full_mesh_members ? std::min(replicas, kMoreReplicas) : 0;
  return {{"replicas", fmt::format("{}", replicas - more)},
          {"ranks", fmt::format("{}", ranks)},
          {"nodes", fmt::format("{}", nodes)},
          {"network", fmt::format("{}", slowest / 1us)},
          {"detection", fmt::format("{}", detection / 1us)},
          {"viewable", viewable ? "y" : "n"},
          {"late", late_writes ? "y" : "n"},
          {"lands", lands_stopped ? "y" : "n"},
          {"rails", fmt::format("{}", rails)},
          {"direct", direct ? "y" : "n"},
          {"doubling", doubling ? "y" : "n"},
          {"full mesh", links.full_mesh_members ? fmt::format("{}", *links.full_mesh_members) : "all"},
          {"spares", fmt::format("{}", links.spares)},
          {"slow streams", slow_streams ? "y" : "n"},
          {"checkpoints", fmt::format("{}", checkpoint_steps)},
          {"evaluates", evaluates ? "y" : "n"},
          {"long updates", long_updates ? "y" : "n"},
          {"coordinators", fmt::format("{}", coordinators)},
          {"relays", fmt::format("{}", relays)},
          {"constant batch", constant_batch ? "y" : "n"},
          {"upgrade", upgrade ? "y" : "n"},
          {"balance", balance ? "y" : "n"},
          {"located", located ? "y" : "n"},
          {"measured", measured ? "y" : "n"},
          {"codings", std::string(kCodingsNames[static_cast<std::size_t>(codings)])},
          {"clips", clips ? "y" : "n"},
          {"stages", stages ? "y" : "n"},
          {"ends", steps > 0 ? "y" : "n"},
          {"old", old ? "y" : "n"}};
}

// Where gradients are coded, one of the model's three buckets does.
std::uint64_t direct_bytes(const Shape& shape) { return !shape.direct ? 0 : shape.coded() ? 1024 : 32768; }

std::size_t pairs_of_values() {
  constexpr std::array<std::size_t, 29> sizes{kReplicas.size(),
                                              kRanks.size(),
                                              2,
                                              2,
                                              kSlowest.size(),
                                              kDetection.size(),
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              5,  // full meshes
                                              kSpares.size(),
                                              kCheckpointSteps.size(),
                                              kCodings,
                                              2,
                                              4,  // numbers of relays
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2,
                                              2};
  std::size_t pairs = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) pairs += sizes[i] * sizes[j];
  return pairs;
}

}  // namespace rejoin::sim
