// Which slices of a rank's state may be served from here, and with which bytes: all of a contributor's; of a joiner's
// those that it has compared with a contributor and that nothing has been written to since.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace rejoin::catchup {

class Proofs {
 public:
  // Forgets everything: nothing is proven any more.
  void none() { *this = {}; }
  void all() { none(), all_ = true; }
  // Begins for a joiner with so many slices, of which none is proven yet.
  void begin(std::size_t slices) {
    none();
    slices_.resize(slices);
  }

  bool is_all() const { return all_; }
  void add(std::uint32_t slice) {
    if (slice >= slices_.size()) return;
    auto& one = slices_[slice];
    one.proven = true;
    if (one.logged) return;
    one.logged = true;
    log_.push_back(slice);
  }
  // Its bytes change, or are in doubt: whoever sends them stops.
  void withdraw(std::uint32_t slice) {
    if (slice >= slices_.size()) return;
    slices_[slice].proven = false;
    ++slices_[slice].bytes;
  }
  // Names the slice's bytes, which are proven; nothing: they are not. Updates by the trainer don't change the name.
  std::optional<std::uint32_t> of(std::uint32_t slice) const {
    if (all_) return 0;
    if (slice >= slices_.size() || !slices_[slice].proven) return std::nullopt;
    return slices_[slice].bytes;
  }
  // The slices that have ever been proven, in that order, each once.
  const std::vector<std::uint32_t>& log() const { return log_; }

 private:
  struct Slice {
    bool proven = false, logged = false;
    std::uint32_t bytes = 1;
  };
  bool all_ = false;
  std::vector<Slice> slices_;
  std::vector<std::uint32_t> log_;
};

}  // namespace rejoin::catchup
