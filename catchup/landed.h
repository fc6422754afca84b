// The joiner takes the digest of each column when it lands, while its bytes are in the cache, and keeps it here. Over
// several rails a landing may be reported after its source has sent `Sent`; and a part may have been written before, by
// this source or another. So each digest is of one generation of a source's writes, which the source names, and fits no
// other.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "local/manifest.h"

namespace rejoin::catchup {

// Names one write of a part by one source. The source counts its writes anew for each connection.
struct Generation {
  ReplicaId source;
  std::uint32_t number = 0;
  bool operator==(const Generation&) const = default;
};

class Landed {
 public:
  void add(Generation generation, std::uint32_t part, std::uint32_t column, std::uint64_t digest) {
    parts_[part][column] = Column{generation, digest};
  }
  // Returns the part's digest if the digests of all its columns are of this generation, and forgets them in any case.
  std::optional<std::uint64_t> take(Generation generation, std::uint32_t part, std::uint32_t columns) {
    const auto known = parts_.extract(part);
    if (known.empty()) return std::nullopt;
    std::uint64_t digest = 0;
    for (std::uint32_t i = 0; i < columns; ++i) {
      const auto& column = known.mapped()[i];
      if (!column || column->generation != generation) return std::nullopt;
      digest = combine_digests(digest, column->digest);
    }
    return digest;
  }
  // Forgets all digests of this source, whose connection is closed: the next one counts its generations anew.
  void forget(ReplicaId source) {
    for (auto& [part, columns] : parts_)
      for (auto& column : columns)
        if (column && column->generation.source == source) column.reset();
  }

 private:
  struct Column {
    Generation generation;
    std::uint64_t digest = 0;
  };
  std::map<std::uint32_t, std::array<std::optional<Column>, local::kMaxColumns>> parts_;
};

// Digests of slices, by part, as they have arrived at one version: for as long as a slice is at that version, they need
// not be taken again.
class Arrived {
 public:
  void put(std::uint32_t slice, std::uint64_t version, std::vector<std::uint64_t> digests) {
    slices_[slice] = {version, std::move(digests)};
  }
  const std::vector<std::uint64_t>* at(std::uint32_t slice, std::uint64_t version) const {
    const auto known = slices_.find(slice);
    return known == slices_.end() || known->second.first != version ? nullptr : &known->second.second;
  }
  void forget(std::uint32_t slice) { slices_.erase(slice); }

 private:
  std::map<std::uint32_t, std::pair<std::uint64_t, std::vector<std::uint64_t>>> slices_;
};

}  // namespace rejoin::catchup
