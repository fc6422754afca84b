#include "device/tests/fake_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "device/kernels/reduce.h"
#include "device/kernels/xxh3.h"
#include "device/tests/cuda_language/device/kernels/ptx.h"
#include "device/tests/fake_driver.h"

namespace rejoin::device::fake {

namespace {

template <typename Pointer>
void make_reachable(Pointer& pointer, std::size_t size) {
  if (pointer != nullptr) pointer = reinterpret_cast<Pointer>(resolve(reinterpret_cast<std::uintptr_t>(pointer), size));
}

// The context is dead, and all its kernels with it.
struct Dead {};
void live() {
  if (dead) throw Dead();
}
template <typename Part>
void until_dead(Part part) {
  try {
    part();
  } catch (const Dead&) {  // what it had to do is never done
  }
}

// A warp of a kernel, of one lane: one thread of the CPU, which does what all of a block's would.
template <bool kPasses>
struct Warp {
  static constexpr bool kCodes = kPasses;
  static constexpr unsigned parts() { return 4; }
  unsigned count = 1;
  unsigned looks = 0;  // at nothing new

  unsigned lane() const { return 0; }
  unsigned lanes() const { return 1; }
  unsigned workers() const { return count; }
  std::uint64_t now() const { return kernels::ptx::nanoseconds(); }
  void relax(unsigned) {
    live();
    look_away(++looks);
  }
  std::uint64_t acquire(const std::uint64_t& from) const {
    live();
    return kernels::ptx::acquire_system(from);
  }
  void release(std::uint64_t& to, std::uint64_t value) const { kernels::ptx::release_system(to, value); }
  std::uint64_t acquire_device(const std::uint64_t& from) const { return kernels::ptx::acquire_device(from); }
  void release_device(std::uint64_t& to, std::uint64_t value) {
    kernels::ptx::release_device(to, value);
    looks = 0;
  }
  std::uint64_t peek(const std::uint64_t& from) const { return kernels::ptx::peek(from); }
  void poke(std::uint64_t& to, std::uint64_t value) const { kernels::ptx::poke(to, value); }
  std::uint64_t claim(std::uint64_t& from) const {
    live();
    return kernels::ptx::claim(from);
  }
  std::uint64_t add(std::uint64_t& to, std::uint64_t more) const { return kernels::ptx::add(to, more); }
  template <typename T>
  T load(std::uint64_t address) const {
    T value;
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
  }
  template <typename T>
  void store(std::uint64_t address, T value) const {
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
  }
  kernels::Work work(const kernels::Work& passed) {
    looks = 0;
    kernels::Work work = passed;
    if (work.type == kernels::Work::kPass) return work;
    const std::size_t size = work.type == kernels::Work::kCopy
                                 ? work.count
                                 : work.count * rejoin::size_of(static_cast<rejoin::DataType>(work.type));
    for (auto* address : {&work.out, &work.a, &work.b})
      *address = reinterpret_cast<std::uintptr_t>(resolve(*address, size));
    return work;
  }
  coding::Pass pass(const coding::Pass& passed) const {
    coding::Pass pass = passed;
    const std::size_t size = pass.count * rejoin::size_of(pass.type);
    make_reachable(pass.own, size);
    make_reachable(pass.arrived, coding::coded_bytes(pass.type, size, pass.arrived_width));
    make_reachable(pass.feedback, size);
    make_reachable(pass.residual, size);
    make_reachable(pass.coded, coding::coded_bytes(pass.type, size, pass.width));
    make_reachable(pass.out, size);
    return pass;
  }
  template <typename Element>
  auto value(typename Element::Storage stored) const {
    return Element::load(stored);
  }
  template <typename Element>
  auto stored(typename Element::Value value) const {
    return Element::store(value);
  }
  // A GPU's instructions make a NaN of their own.
  float product(float one, float other) const {
    const float product = one * other;
    return std::isnan(product) ? std::bit_cast<float>(0x7fffffffu) : product;
  }
  template <unsigned kCount, typename Body>
  void unrolled(Body body) const {
    for (unsigned i = 0; i < kCount; ++i) body(i);
  }
  void meet() const {}
  std::uint64_t of_first(std::uint64_t value) const { return value; }
  struct Both {
    std::uint64_t one, other;
  };
  Both both(const std::uint64_t& one, const std::uint64_t& other) const { return {acquire(one), acquire(other)}; }
  std::uint32_t most(std::uint32_t value) const { return value; }
  std::uint32_t least(std::uint32_t value) const { return value; }
  template <typename Find>
  std::uint64_t one(Find find) const {
    return find();
  }
  template <typename Store>
  void from_first(Store store) const {
    store();
  }
  std::uint32_t most_of_block(std::uint32_t value) const { return value; }
  template <unsigned kCount>
  void swap_halves(std::uint32_t (&words)[kCount]) const {
    std::swap_ranges(words, words + kCount / 2, words + kCount / 2);
  }
  float sum(float value) const { return value; }
  void accumulate(double& to, double more) const { kernels::ptx::accumulate(to, more); }
};

template <bool kPasses>
void run(unsigned blocks, kernels::ReduceArguments arguments) {
  const auto relay = reinterpret_cast<std::uintptr_t>(arguments.relay);
  arguments.relay = reinterpret_cast<kernels::Relay*>(resolve(relay, sizeof(kernels::Relay)));
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; ++b)
    running.emplace_back([=] {
      Warp<kPasses> warp{.count = blocks};
      until_dead([&] { kernels::serve(warp, arguments); });
    });
  Warp<kPasses> warp{.count = blocks};
  until_dead([&] { kernels::watch(warp, arguments); });
  for (auto& thread : running) thread.join();
}

}  // namespace

void run_reduce(unsigned blocks, const kernels::ReduceArguments& arguments) { run<false>(blocks, arguments); }
void run_code(unsigned blocks, const kernels::ReduceArguments& arguments) { run<true>(blocks, arguments); }

void run_digest(const kernels::DigestArguments& arguments) {
  constexpr std::size_t block = kernels::xxh3::kBytes;
  const auto* keys = reinterpret_cast<const kernels::xxh3::Keys*>(
      resolve(arguments.keys, kernels::xxh3::kLanes * sizeof(kernels::xxh3::Keys)));
  auto* hashes = reinterpret_cast<std::uint64_t*>(resolve(arguments.hashes, arguments.items * 8));
  char* tails = resolve(arguments.tails, arguments.count * block);
  for (std::uint64_t i = 0; i < arguments.items; ++i) {
    const std::uint64_t number = kernels::range_of(arguments, i);
    const auto& range = arguments.ranges[number];
    const std::size_t before = (i - range.first) * block;
    const char* data = resolve(range.data, range.size) + before;
    if (range.size - before < block) {
      std::memcpy(tails + number * block, data, range.size - before);
      continue;
    }
    hashes[i] = kernels::xxh3::hash(
        [&](unsigned offset) {
          kernels::xxh3::Pair pair;
          std::memcpy(&pair, data + offset, sizeof pair);
          return pair;
        },
        keys);
  }
}

}  // namespace rejoin::device::fake
