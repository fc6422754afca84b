// What grows with ranks, with losses and with steps, and what does not. Memory is counted where it is taken, which the
// sanitizers do themselves: no sanitizer build has these.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <new>

#include "sim/long_job.h"
#include "sim/scale.h"

// The pieces of memory that a thread has taken by new, with the sizes that were asked for, while it counts them.
template <typename T>
struct Uncounted {
  using value_type = T;
  Uncounted() = default;
  template <typename Other>
  Uncounted(const Uncounted<Other>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(std::malloc(count * sizeof(T))); }
  void deallocate(T* gone, std::size_t) { std::free(gone); }
  bool operator==(const Uncounted&) const = default;
};
struct Counted {
  std::map<void*, std::size_t, std::less<>, Uncounted<std::pair<void* const, std::size_t>>> pieces;
  std::uint64_t bytes = 0;
};
static thread_local Counted* counted = nullptr;
void* operator new(std::size_t size) {
  void* const made = std::malloc(size);
  if (made == nullptr) throw std::bad_alloc();
  if (counted != nullptr) counted->bytes += counted->pieces[made] = size;
  return made;
}
void operator delete(void* gone) noexcept {
  if (counted != nullptr)
    if (const auto piece = counted->pieces.extract(gone); !piece.empty()) counted->bytes -= piece.mapped();
  std::free(gone);
}
void operator delete(void* gone, std::size_t) noexcept { operator delete(gone); }

namespace rejoin::sim {
namespace {

// What reaches the coordinator for a step grows with replicas, not with ranks, but for two digests of each.
TEST(Scale, ManyMoreRanksAreNoMoreMessagesToTheCoordinator) {
  const ScaleResult few = measure_scale({.replicas = 6, .ranks = 16, .steps = 5});
  const ScaleResult many = measure_scale({.replicas = 6, .ranks = 512, .steps = 5});
  EXPECT_EQ(few.coordinator.messages, 12) << "a report of each replica, and a plan to each";
  EXPECT_EQ(many.coordinator.messages, 12);
  EXPECT_LT(many.coordinator.bytes, few.coordinator.bytes * 1.05 + 6 * 512 * 16);
  EXPECT_LT(many.coordinator_bytes_per_rank, 210);
  const ScaleResult direct = measure_scale({.replicas = 6, .ranks = 512, .relays = false, .steps = 5});
  EXPECT_EQ(direct.coordinator.messages, 6 * 64 * 2) << "without relays, with nodes";
}

// Coordinator, relays and daemons' machines, while replicas are lost and come back.
TEST(Scale, NoMachineKeepsMoreAfterTenTimesTheSteps) {
  Counted all;
  counted = &all;
  const Kept kept =
      measure_kept({.replicas = 4, .ranks = 4, .ranks_per_node = 2, .steps = 400}, [&] { return all.bytes; });
  counted = nullptr;
  EXPECT_GT(kept.after_some, 8 * KiB) << "nothing is counted";
  EXPECT_LT(kept.after_many, kept.after_some + 2 * KiB) << "360 losses and 3,600 steps have left something behind";
}

// Its log, what recovery reads and the snapshot are no larger after many steps than after some.
TEST(LongJob, LeavesNoMoreBehindTheLongerItRuns) {
  constexpr std::uint64_t steps = 300'000;  // the ledger keeps 65,536 one by one
  std::string directory = (std::filesystem::temp_directory_path() / "rejoin-sim-XXXXXX").string();
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  std::map<std::uint64_t, LongJobState> states;
  const auto ran = run_long_job(
      {.replicas = 4, .steps = steps, .steps_between_losses = 300, .log_compact = 1 << 20, .directory = directory},
      [&](const LongJobState& state) { states[state.steps] = state; });
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(ran) << ran.error().message;
  const auto &some = states.at(100'000), &many = states.at(steps);
  EXPECT_LT(many.log_bytes, some.log_bytes * 5 / 4);
  EXPECT_LT(many.snapshot_bytes, some.snapshot_bytes * 5 / 4);
  EXPECT_LT(many.heap_bytes, some.heap_bytes * 21 / 20);
}

}  // namespace
}  // namespace rejoin::sim
