#include "sim/debt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace rejoin::sim {

namespace {

constexpr std::size_t kBlock = 16;      // elements
constexpr double kMostLost = 1.0 / 14;  // of a block's largest magnitude, where one member codes it: in 4 bits
constexpr double kRounding = 0x1p-20;   // of all sums of a step in float32, in relation to the largest

}  // namespace

std::optional<std::string> Debt::add(const std::vector<float>& mean, const std::vector<float>& result,
                                     const std::vector<float>& magnitudes, const std::set<std::uint64_t>& processes,
                                     float factor) {
  owed_.resize(mean.size());
  kept_.resize((mean.size() + kBlock - 1) / kBlock);
  gone_.resize(kept_.size());
  const bool left = !std::ranges::includes(processes, processes_);
  processes_ = processes;
  for (std::size_t block = 0; block < kept_.size(); ++block) {
    const std::size_t begin = block * kBlock, end = std::min(mean.size(), begin + kBlock);
    if (left) gone_[block] += kept_[block];
    kept_[block] *= factor;
    gone_[block] *= factor;
    const double largest = *std::max_element(magnitudes.begin() + static_cast<std::ptrdiff_t>(begin),
                                             magnitudes.begin() + static_cast<std::ptrdiff_t>(end));
    kept_[block] = static_cast<double>(processes.size()) * kMostLost * (largest + kept_[block]);
    gone_[block] += kRounding * (largest + kept_[block]);
    for (std::size_t i = begin; i < end; ++i) {
      owed_[i] = owed_[i] * factor + static_cast<double>(mean[i]) - static_cast<double>(result[i]);
      if (!(std::abs(owed_[i]) <= kept_[block] + gone_[block]))
        return fmt::format("element {}: the results are off by {}, and may be by {}", i, owed_[i],
                           kept_[block] + gone_[block]);
    }
  }
  return std::nullopt;
}

}  // namespace rejoin::sim
