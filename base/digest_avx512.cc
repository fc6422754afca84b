// digest() for CPUs with avx512; compiled with that instruction set.
#include "base/digest_kernel.h"

namespace rejoin {

std::uint64_t digest_avx512(BytesView bytes) { return digest_kernel::run(bytes); }
std::uint64_t digest_and_copy_avx512(std::byte* to, BytesView from) { return digest_kernel::run_and_copy(to, from); }

}  // namespace rejoin
