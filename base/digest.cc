#include "base/digest.h"

#include "base/digest_kernel.h"

namespace rejoin {

#if defined(__x86_64__)
std::uint64_t digest_avx2(BytesView bytes);
std::uint64_t digest_avx512(BytesView bytes);
std::uint64_t digest_and_copy_avx2(std::byte* to, BytesView from);
std::uint64_t digest_and_copy_avx512(std::byte* to, BytesView from);
#endif

namespace {

std::uint64_t digest_generic(BytesView bytes) { return digest_kernel::run(bytes); }
std::uint64_t digest_and_copy_generic(std::byte* to, BytesView from) { return digest_kernel::run_and_copy(to, from); }

struct Kernels {
  std::uint64_t (*digest)(BytesView);
  std::uint64_t (*digest_and_copy)(std::byte*, BytesView);
};

// Of arm64 every CPU has the vectors that the generic ones are compiled for.
Kernels choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {digest_avx512, digest_and_copy_avx512};
  if (__builtin_cpu_supports("avx2")) return {digest_avx2, digest_and_copy_avx2};
#endif
  return {digest_generic, digest_and_copy_generic};
}

const Kernels chosen = choose();

}  // namespace

std::uint64_t digest(BytesView bytes) { return chosen.digest(bytes); }
std::uint64_t digest_and_copy(std::byte* to, BytesView from) { return chosen.digest_and_copy(to, from); }
std::uint64_t digest_plain(BytesView bytes) { return digest_generic(bytes); }
std::uint64_t digest_and_copy_plain(std::byte* to, BytesView from) { return digest_and_copy_generic(to, from); }

std::uint64_t digest_of_block(BytesView block) { return XXH3_64bits(block.data(), block.size()); }
std::uint64_t digest_of_hashes(std::uint64_t bytes, std::span<const std::uint64_t> hashes) {
  return digest_kernel::of_hashes(bytes, hashes);
}

std::uint64_t combine_digests(std::uint64_t so_far, std::uint64_t next) { return digest_kernel::combine(so_far, next); }

}  // namespace rejoin
