// Who is near whom, by the least round trips of their connections (base/round_trip.h).
//
// Ranks measure: each tells the lengths for those that it is connected with, and a replica's is that of its rank for
// which it is longest. Between two the shorter one counts that either tells. So each tells of few (kMostMeasured), and
// what is known of all are as many ways as there are connections.
//
// A neighbourhood is what the shortest ways connect, where each way out of it is much longer than the longest of them.
// So neighbourhoods lie in each other or apart: hosts of a room, rooms of a town, towns. A ring that has each together
// enters each once, and crosses what is slow as few times as there can be.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/round_trip.h"
#include "control.pb.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

constexpr std::size_t kMostMeasured = 128;  // peers that one process tells of

// From one process or replica to others, by their incarnations.
class RoundTrips {
 public:
  using Told = google::protobuf::RepeatedPtrField<proto::RoundTrips>;
  RoundTrips() = default;
  explicit RoundTrips(const Told& told);  // nothing, where it makes no sense
  void to(Told* told) const;

  void put(std::uint64_t incarnation, RoundTripLength length);
  void keep_longer(const RoundTrips& other);  // of each peer
  bool empty() const { return by_length_.empty(); }
  std::uint64_t size() const;
  // Ascending, none of them empty.
  const std::vector<std::pair<RoundTripLength, Incarnations>>& by_length() const { return by_length_; }
  bool operator==(const RoundTrips&) const = default;

 private:
  Incarnations& at(RoundTripLength length);
  void forget_empty();

  std::vector<std::pair<RoundTripLength, Incarnations>> by_length_;
};

// Whether the two tell of their connection, where each has so many that it can't tell of all.
bool is_told(std::uint64_t one, std::uint64_t other, std::size_t connections);

struct Way {
  std::uint32_t one = 0, other = 0;  // positions
  RoundTripLength length = 0;
};
struct Measured {
  std::uint64_t incarnation = 0;
  const RoundTrips* told = nullptr;  // null: nothing
};
std::vector<Way> ways_between(const std::vector<Measured>& members);

using Neighbourhoods = std::vector<std::vector<std::uint32_t>>;
// By positions, those that lie in others first. None has all of the `members`, or one alone.
Neighbourhoods neighbourhoods(std::size_t members, std::vector<Way> ways);

// The order in which they stand instead of in that of their positions: neighbourhoods together, each where the first of
// it stood, and otherwise as they did. Where that crosses nothing less often, they stay.
std::vector<std::uint32_t> together(std::size_t members, const Neighbourhoods& neighbourhoods);

// How often a closed ring in this order leads into or out of a neighbourhood.
std::uint64_t crossings(const std::vector<std::uint32_t>& order, const Neighbourhoods& neighbourhoods);

}  // namespace rejoin::membership
