// The kernels as a GPU runs them: what is the machine's, around the bodies in reduce.h and xxh3.h.
#include "device/kernels/ptx.h"
#include "device/kernels/reduce.h"
#include "device/kernels/xxh3.h"

namespace rejoin::device::kernels {

namespace {

constexpr unsigned kLanes = 32, kAll = ~0u;

template <bool kPasses>
class Gpu {
 public:
  static constexpr bool kCodes = kPasses;
  __device__ static constexpr unsigned parts() { return 1; }

  __device__ unsigned lane() const { return threadIdx.x % kLanes; }
  __device__ unsigned lanes() const { return kLanes; }
  // The last warp of the first block does not work.
  __device__ bool watches() const { return blockIdx.x == 0 && threadIdx.x >= blockDim.x - kLanes; }
  __device__ unsigned workers() const { return gridDim.x * (blockDim.x / kLanes) - 1; }

  __device__ std::uint64_t now() const { return ptx::nanoseconds(); }
  __device__ void relax(unsigned ns) const {
    if (ns > 0) __nanosleep(ns);
  }
  __device__ std::uint64_t acquire(const std::uint64_t& from) const { return ptx::acquire_system(from); }
  __device__ void release(std::uint64_t& to, std::uint64_t value) const { ptx::release_system(to, value); }
  __device__ std::uint64_t acquire_device(const std::uint64_t& from) const { return ptx::acquire_device(from); }
  __device__ void release_device(std::uint64_t& to, std::uint64_t value) const { ptx::release_device(to, value); }
  __device__ std::uint64_t peek(const std::uint64_t& from) const { return ptx::peek(from); }
  __device__ void poke(std::uint64_t& to, std::uint64_t value) const { ptx::poke(to, value); }
  __device__ std::uint64_t claim(std::uint64_t& from) const { return ptx::claim(from); }
  __device__ std::uint64_t add(std::uint64_t& to, std::uint64_t more) const { return ptx::add(to, more); }

  // Through the L2 cache only, where what a NIC has written is seen.
  template <typename T>
  __device__ T load(std::uint64_t address) const {
    if constexpr (sizeof(T) == 16) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(address));
      return {{words.x, words.y, words.z, words.w}};
    } else {
      return __ldcg(reinterpret_cast<const T*>(address));
    }
  }
  template <typename T>
  __device__ void store(std::uint64_t address, T value) const {
    if constexpr (sizeof(T) == 16)  // as one, whatever it was made of
      __stcg(reinterpret_cast<uint4*>(address),
             make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
    else *reinterpret_cast<T*>(address) = value;
  }
  __device__ Work work(const Work& passed) const { return whole(passed); }
  __device__ coding::Pass pass(const coding::Pass& passed) const { return whole(passed); }

  // Halves are converted by an instruction, with the same result.
  template <typename Element>
  __device__ auto value(typename Element::Storage stored) const {
    if constexpr (std::is_same_v<Element, arithmetic::Float16>) return ptx::from_float16(stored);
    else return Element::load(stored);
  }
  template <typename Element>
  __device__ auto stored(typename Element::Value value) const {
    if constexpr (std::is_same_v<Element, arithmetic::Float16>) return ptx::to_float16(value);
    else return Element::store(value);
  }

  __device__ float product(float one, float other) const { return one * other; }
  template <unsigned kCount, typename Body>
  __device__ void unrolled(Body body) const {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) body(i);
  }

  __device__ void meet() const { __syncwarp(); }
  // The first lane finds out, and all get it.
  template <typename Find>
  __device__ std::uint64_t one(Find find) const {
    std::uint64_t found = 0;
    if (lane() == 0) found = find();
    return of_first(found);
  }
  __device__ std::uint64_t of_first(std::uint64_t value) const {
    __syncwarp();
    return __shfl_sync(kAll, value, 0);
  }
  // Two flags of the CPU's, in one trip over PCIe.
  struct Both {
    std::uint64_t one, other;
  };
  __device__ Both both(const std::uint64_t& one, const std::uint64_t& other) const {
    std::uint64_t value = 0;
    if (lane() < 2) value = ptx::acquire_system(lane() == 0 ? one : other);
    __syncwarp();
    return {__shfl_sync(kAll, value, 0), __shfl_sync(kAll, value, 1)};
  }
  __device__ std::uint32_t most(std::uint32_t value) const { return __reduce_max_sync(kAll, value); }
  __device__ std::uint32_t least(std::uint32_t value) const { return __reduce_min_sync(kAll, value); }
  // After all lanes' stores, the first one tells.
  template <typename Store>
  __device__ void from_first(Store store) const {
    __syncwarp();
    if (lane() == 0) store();
  }

  // Of the four lanes that share a block; the other half of it; of all lanes.
  __device__ std::uint32_t most_of_block(std::uint32_t value) const {
    for (unsigned step = 1; step < 4; step *= 2) value = std::max(value, __shfl_xor_sync(kAll, value, step));
    return value;
  }
  template <unsigned kCount>
  __device__ void swap_halves(std::uint32_t (&words)[kCount]) const {
    unrolled<kCount>([&](unsigned i) { words[i] = __shfl_xor_sync(kAll, words[i], 2); });
  }
  __device__ float sum(float value) const {
    for (unsigned step = 1; step < kLanes; step *= 2)
      value += std::bit_cast<float>(__shfl_xor_sync(kAll, std::bit_cast<std::uint32_t>(value), step));
    return value;
  }
  __device__ void accumulate(double& to, double more) const { ptx::accumulate(to, more); }

 private:
  template <typename T>
  __device__ T whole(const T& passed) const {
    struct {
      Vector of[sizeof(T) / sizeof(Vector)];
    } vectors;
    unrolled<sizeof(T) / sizeof(Vector)>(
        [&](unsigned i) { vectors.of[i] = load<Vector>(address_of(passed) + i * sizeof(Vector)); });
    return std::bit_cast<T>(vectors);
  }
};

template <typename Machine>
__device__ __forceinline__ void take_works(const ReduceArguments& arguments) {
  Machine gpu;
  if (gpu.watches()) watch(gpu, arguments);
  else serve(gpu, arguments);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) rejoin_reduce(ReduceArguments arguments) {
  take_works<Gpu<false>>(arguments);
}
// The same for whoever codes: passes need what additions have no use for.
extern "C" __global__ void __launch_bounds__(512, 1) rejoin_code(ReduceArguments arguments) {
  take_works<Gpu<true>>(arguments);
}

// What is behind a range's whole blocks, by a warp.
__device__ inline void copy_tail(std::uint64_t from, std::uint64_t to, std::uint64_t size, unsigned lane) {
  constexpr unsigned at_once = DigestRange::kBlock / sizeof(uint4) / kLanes;
  const std::uint64_t vectors = size / sizeof(uint4);
#pragma unroll
  for (unsigned i = 0; i < at_once; ++i)
    if (lane + i * kLanes < vectors)
      reinterpret_cast<uint4*>(to)[lane + i * kLanes] = reinterpret_cast<const uint4*>(from)[lane + i * kLanes];
  const std::uint64_t byte = vectors * sizeof(uint4) + lane;
  if (byte < size) *reinterpret_cast<std::uint8_t*>(to + byte) = *reinterpret_cast<const std::uint8_t*>(from + byte);
}

// A warp for each item, all eight loads of a lane in flight at once.
extern "C" __global__ void __launch_bounds__(256) rejoin_digest(const __grid_constant__ DigestArguments arguments) {
  const unsigned lane = threadIdx.x % xxh3::kLanes;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * (blockDim.x / xxh3::kLanes);
  const std::uint64_t warp = (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / xxh3::kLanes;
  const xxh3::Keys keys = reinterpret_cast<const xxh3::Keys*>(arguments.keys)[lane];
  for (std::uint64_t i = warp; i < arguments.items; i += warps) {
    const std::uint64_t number = range_of(arguments, i);
    const DigestRange& range = arguments.ranges[number];
    const std::uint64_t before = (i - range.first) * xxh3::kBytes, at = range.data + before;
    if (range.size - before < xxh3::kBytes) {
      copy_tail(at, arguments.tails + number * xxh3::kBytes, range.size - before, lane);
      continue;
    }
    ulonglong2 data[xxh3::kRounds][xxh3::kTurns];
#pragma unroll
    for (unsigned round = 0; round < xxh3::kRounds; ++round)
#pragma unroll
      for (unsigned turn = 0; turn < xxh3::kTurns; ++turn)
        data[round][turn] = __ldcs(reinterpret_cast<const ulonglong2*>(at + xxh3::offset_of(lane, round, turn)));
    xxh3::Pair sums = xxh3::start(lane);
#pragma unroll
    for (unsigned round = 0; round < xxh3::kRounds; ++round) {
      xxh3::Pair mine;
#pragma unroll
      for (unsigned turn = 0; turn < xxh3::kTurns; ++turn)
        xxh3::accumulate(mine, {data[round][turn].x, data[round][turn].y}, xxh3::key_of(keys, lane, round, turn));
#pragma unroll
      for (unsigned step = 4; step < xxh3::kLanes; step *= 2) {
        mine.even += __shfl_xor_sync(~0u, mine.even, step);
        mine.odd += __shfl_xor_sync(~0u, mine.odd, step);
      }
      sums.even += mine.even;
      sums.odd += mine.odd;
      if (round + 1 < xxh3::kRounds) sums = xxh3::scrambled(sums, keys.scramble);
    }
    std::uint64_t shares = xxh3::share(sums, keys.merge);
    shares += __shfl_xor_sync(~0u, shares, 1);
    shares += __shfl_xor_sync(~0u, shares, 2);
    if (lane == 0) reinterpret_cast<std::uint64_t*>(arguments.hashes)[i] = xxh3::finish(shares);
  }
}

}  // namespace rejoin::device::kernels
