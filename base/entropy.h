// Numbers that nobody can foresee, for what must not be mistaken for another.
#pragma once

#include <cstdint>

namespace rejoin {

std::uint64_t random_number();  // 64 bits of the system's

}  // namespace rejoin
