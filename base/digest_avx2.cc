// digest() for CPUs with avx2; compiled with that instruction set.
#include "base/digest_kernel.h"

namespace rejoin {

std::uint64_t digest_avx2(BytesView bytes) { return digest_kernel::run(bytes); }
std::uint64_t digest_and_copy_avx2(std::byte* to, BytesView from) { return digest_kernel::run_and_copy(to, from); }

}  // namespace rejoin
