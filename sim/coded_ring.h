// The mean that a ring makes whose members code: computed alone, bit for bit, from who stands where and what each
// contributes. Of the protocol it knows in which order a segment is added up, and who codes what of it; of failures,
// retries and epochs nothing: what coding has lost is kept of committed steps only.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ftar/coding.h"

namespace rejoin::sim {

class CodedRing {
 public:
  struct Member {
    std::uint64_t process = 0;
    ftar::Coding coding = ftar::Coding::off;  // not automatic: that depends on times
  };

  // Of a bucket in a step that is committed. The first members are the contributors, in the order of `inputs`.
  // `factor`: how much the step before has counted.
  std::vector<float> mean(std::uint64_t step, std::uint32_t bucket, const std::vector<Member>& ring,
                          const std::vector<std::vector<float>>& inputs, std::uint32_t divisor, float factor);

 private:
  struct Lost {
    std::uint64_t step = 0;
    std::uint32_t divisor = 1;
    bool any = false;
    std::vector<float> values;  // of sums
  };
  std::map<std::pair<std::uint64_t, std::uint32_t>, Lost> lost_;  // by process and bucket, of the last committed step
};

}  // namespace rejoin::sim
