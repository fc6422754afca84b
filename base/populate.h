// Memory of the host gets its pages now, all at once, instead of one by one as it is touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

namespace rejoin {

// `memory` begins with a page. Kernels before 5.14 don't know this: there the pages come as they are touched.
inline void populate(std::span<std::byte> memory) {
  (void)::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE);
}

}  // namespace rejoin
