// Compiled without fast-math and without contraction: the bits of an element must not depend on the range that it is
// updated in, since a joiner gets a tensor in slices and its peers get it whole.
#include <cmath>

#include "examples/model.h"

namespace rejoin::demo {

void AdamW::apply(std::uint64_t step, std::span<float> weight, std::span<float> first, std::span<float> second,
                  std::span<const float> gradient) const {
  const AdamW own = *this;  // no float of it may be one of those written
  const float correction1 = 1.0f - static_cast<float>(std::pow(beta1, static_cast<double>(step)));
  const float correction2 = 1.0f - static_cast<float>(std::pow(beta2, static_cast<double>(step)));
  for (std::size_t i = 0; i < weight.size(); ++i) {
    first[i] = own.beta1 * first[i] + (1 - own.beta1) * gradient[i];
    second[i] = own.beta2 * second[i] + (1 - own.beta2) * gradient[i] * gradient[i];
    const float update = (first[i] / correction1) / (std::sqrt(second[i] / correction2) + own.epsilon);
    weight[i] -= own.rate * (update + own.decay * weight[i]);
  }
}

}  // namespace rejoin::demo
