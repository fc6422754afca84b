// Numbers that nobody can foresee, for what must not be guessed or mistaken for another.
#pragma once

#include <cstdint>
#include <span>

namespace rejoin {

std::uint64_t random_number();  // 64 bits of the system's
void fill_with_random_numbers(std::span<std::uint64_t> numbers);

}  // namespace rejoin
