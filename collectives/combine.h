// The arithmetic of a group's reductions in the host's memory, element by element.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace rejoin::collectives {

// out = first ⊕ second, as Combine says; `last` with a mean divides the rounded sum by `members`. `out` may be one of
// the operands; they may not overlap otherwise. Bitwise ones take integers alone. `count` in elements; pointers need
// the alignment of bytes only.
void combine(Combine how, DataType type, std::byte* out, const std::byte* first, const std::byte* second,
             std::size_t count, bool last, std::uint32_t members);

}  // namespace rejoin::collectives
