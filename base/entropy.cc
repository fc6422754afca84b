#include "base/entropy.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/fail.h"

namespace rejoin {

void fill_with_random_numbers(std::span<std::uint64_t> numbers) {
  auto rest = std::as_writable_bytes(numbers);
  while (!rest.empty()) {
    const ssize_t got = ::getrandom(rest.data(), rest.size(), 0);
    REJOIN_CHECK(got > 0 || errno == EINTR, "getrandom: {}", std::strerror(errno));
    if (got > 0) rest = rest.subspan(static_cast<std::size_t>(got));
  }
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  fill_with_random_numbers({&number, 1});
  return number;
}

}  // namespace rejoin
