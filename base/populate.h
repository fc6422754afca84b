// Memory of the host gets its pages now, all at once, instead of one by one as it is touched.
// See "Pages that can't be had" in docs/design-notes.md.
#pragma once

#include <cstddef>
#include <span>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin {

// `memory` begins with a page. Kernels before 5.14, and sandboxes, don't know this: there the pages come as they are
// touched. Errors: `exhausted`, where touching it would end the process.
Result<> populate(std::span<std::byte> memory);
// Gives a file's first `size` bytes their blocks or pages, whatever signals come meanwhile. Returns errno's number; 0:
// done.
int allocate(const Fd& file, std::size_t size);
// Gives a memfd's first `size` bytes their pages where the system does not overcommit; elsewhere they come as they are
// touched. Errors: `exhausted`.
Result<> reserve(const Fd& memfd, std::size_t size);

}  // namespace rejoin
