#include "base/entropy.h"

#include <random>

namespace rejoin {

std::uint64_t random_number() {
  std::random_device entropy;
  return std::uint64_t{entropy()} << 32 | entropy();
}

}  // namespace rejoin
