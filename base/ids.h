// Strong numeric types, so that an epoch can't be passed where a step is meant, and ranges of samples.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

#pragma GCC visibility push(default)
namespace rejoin {

template <typename Tag, typename T = std::uint64_t>
struct Id {
  using Value = T;
  T value{};
  constexpr Id() = default;
  constexpr explicit Id(T v) : value(v) {}
  constexpr auto operator<=>(const Id&) const = default;
  constexpr Id next() const { return Id(static_cast<T>(value + 1)); }
};

using ReplicaId = Id<struct ReplicaTag, std::uint32_t>;  // which copy of the model
using RankId = Id<struct RankTag, std::uint32_t>;        // which shard inside a replica
using Epoch = Id<struct EpochTag>;                       // numbered membership; 0 is "none yet"
using Step = Id<struct StepTag>;  // optimizer step; the version of a tensor is the last step in it
constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 48;  // pages and tags have room for so many
using Incarnation = Id<struct IncarnationTag>;                // one registration of a replica; never reused in a job

struct SampleRange {
  std::uint64_t begin = 0, end = 0;  // of the endless sample stream: sample k is number k mod N of the data
  constexpr std::uint64_t size() const { return end - begin; }
  bool operator==(const SampleRange&) const = default;
};

}  // namespace rejoin

template <typename Tag, typename T>
struct std::hash<rejoin::Id<Tag, T>> {
  std::size_t operator()(const rejoin::Id<Tag, T>& id) const noexcept { return std::hash<T>{}(id.value); }
};

#pragma GCC visibility pop
