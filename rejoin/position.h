// Where a job stands: the step that a state is of, and which samples are trained in the steps up to it. A checkpoint is
// a rank's weights and moments with this beside them; a job that starts again gives all of it back, and then no sample
// is trained twice or not at all, whether its coordinator has kept its log or not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

#pragma GCC visibility push(default)
namespace rejoin {

class Position {
 public:
  Position() = default;  // the position of a fresh job
  // The session calls this; a trainer gets a position from Session::position() or from_text().
  Position(std::uint64_t step, std::vector<SampleRange> trained, std::optional<std::uint64_t> digest)
      : step_(step), trained_(std::move(trained)), digest_(digest) {}

  // One line of printable ASCII, without a line's end. It carries its own version and a checksum, and nothing in it is
  // for anybody but from_text(). Errors: `corrupt`, `mismatch` (it is of a later version of this library).
  std::string text() const;
  static Result<Position> from_text(std::string_view text);

  std::uint64_t step() const { return step_; }
  const std::vector<SampleRange>& trained() const { return trained_; }    // ascending, and none touches the next
  const std::optional<std::uint64_t>& digest() const { return digest_; }  // of the rank's state
  // Returns the position for a state that was changed on purpose since it was saved, say converted or divided otherwise
  // among ranks: join() does not compare that with what was saved.
  Position without_digest() const { return {step_, trained_, std::nullopt}; }
  bool operator==(const Position&) const = default;

 private:
  std::uint64_t step_ = 0;
  std::vector<SampleRange> trained_;
  std::optional<std::uint64_t> digest_;
};

}  // namespace rejoin

#pragma GCC visibility pop
