// A set of rank numbers as ranges: what a message about many ranks carries, small however many they are.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace google::protobuf {
template <typename Element>
class RepeatedPtrField;
}
namespace rejoin::proto {
class Range;
}

namespace rejoin::membership {

class RankSet {
 public:
  using Ranges = google::protobuf::RepeatedPtrField<proto::Range>;
  RankSet() = default;
  explicit RankSet(std::uint32_t rank) { add(rank, std::uint64_t{rank} + 1); }
  // Of a message: empty and overlapping ranges do no harm; numbers from `limit` on are left out.
  RankSet(const Ranges& ranges, std::uint64_t limit);
  void to(Ranges* ranges) const;

  void add(std::uint64_t begin, std::uint64_t end);
  void insert(std::uint64_t one) { add(one, one + 1); }
  void add(const RankSet& other);
  void remove(const RankSet& other);
  void clear() { ranges_.clear(); }
  bool empty() const { return ranges_.empty(); }
  std::uint64_t size() const;
  bool contains(std::uint64_t rank) const;
  bool includes(const RankSet& other) const;
  RankSet common(const RankSet& other) const;  // what both have
  // "3, 8-15"
  std::string text() const;
  const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges() const { return ranges_; }
  auto operator<=>(const RankSet&) const = default;

 private:
  void join(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ascending);

  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;  // [begin, end), ascending, apart
};

// Incarnations are numbered as they are given out, so those of a whole job are few ranges.
using Incarnations = RankSet;

}  // namespace rejoin::membership
