// What the real trainer keeps in files, and what it reads: checkpoints, metrics.
#pragma once

#include <string>

#include "examples/model.h"
#include "rejoin/session.h"

namespace rejoin::demo {

inline std::span<const float> floats(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}
// Where in the first `size` bytes the samples begin.
std::vector<std::uint64_t> positions_of(const std::vector<SampleRange>& batch, std::size_t size);
// The mean loss over windows of the text's last `held_out` bytes.
double evaluate(const ModelShape& shape, const Views& weights, std::string_view text, std::size_t held_out);

// A directory that all replicas see. Its checkpoint of a rank is one file, replaced as a whole: the position's line,
// and then the state's bytes.
class Directory {
 public:
  explicit Directory(std::string path) : path_(std::move(path)) {}
  // Fills `state` with the checkpoint's; where there is none it stays as it is, and the position is a fresh job's.
  Result<Position> restore(std::uint32_t rank, const std::vector<std::span<std::byte>>& state) const;
  Result<> save(std::uint32_t rank, const Position& position, const std::vector<std::span<std::byte>>& state) const;
  // Whether checkpoints and this rank's metrics can be written there. Errors: `invalid_argument`.
  Result<> check(const SessionConfig& config) const;
  // A line of metrics.
  Result<> append_metric(const SessionConfig& config, const Session::Step& step, const std::string& what) const;

 private:
  std::string checkpoint(std::uint32_t rank) const;
  std::string metrics(const SessionConfig& config) const;
  const std::string path_;
};

}  // namespace rejoin::demo
