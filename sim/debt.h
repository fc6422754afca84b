// Bounded-error: by how much the results of all steps together differ from the means of what was contributed. What
// coding loses in a step is made up for in the next, so that is no more than what the last step's coding may lose, and
// what processes that contribute no more had kept; each times how much the trainers say that a step has counted.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace rejoin::sim {

class Debt {  // of one bucket
 public:
  // A step is committed. `magnitudes`: by element, means of the contributions' magnitudes. `processes`: that
  // contribute. `factor`: how much the step before has counted. What is wrong, if anything is.
  std::optional<std::string> add(const std::vector<float>& mean, const std::vector<float>& result,
                                 const std::vector<float>& magnitudes, const std::set<std::uint64_t>& processes,
                                 float factor);

 private:
  std::vector<double> owed_;         // by element
  std::vector<double> kept_, gone_;  // by block, at most: by those who contribute, and by those who did
  std::set<std::uint64_t> processes_;
};

}  // namespace rejoin::sim
