// The arithmetic: out = a + b, element by element, or out = (a + b) / contributors as the last addition of a mean.
// The same bits on every CPU, whichever vector instructions it has.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/types.h"

namespace rejoin::ftar {

// `divisor` 0 or 1: a plain sum. `out` may be `a` or `b`; the three may not overlap otherwise. `count` in elements.
// Pointers need the alignment of bytes only.
void add(DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor = 0);

// The instruction set chosen for this CPU: "avx512", "avx2" or "generic".
std::string_view instruction_set();
// For tests: the same with the instruction set given, where this CPU has it; false where it has not.
bool add_with(std::string_view instruction_set, DataType type, void* out, const void* a, const void* b,
              std::size_t count, std::uint32_t divisor);

}  // namespace rejoin::ftar
