// The body of the reduce kernel, for whatever runs it: a GPU (kernels.cu), or threads of a CPU (tests/fake_cuda.cc).
// The Machine says which thread of how many this is, and how memory is reached that the CPU or a NIC writes meanwhile.
// The CPU-driven ring with the GPU as its arithmetic follows FT-HSDP's FTAR (arXiv 2602.00277) and NCCLX's (arXiv
// 2510.20171): fixed chunks, a kernel per operation, flags in pinned memory.
#pragma once

#include "base/arithmetic.h"
#include "device/kernels/mailbox.h"

namespace rejoin::device::kernels {

struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <typename Storage>
struct Lanes {
  static constexpr unsigned kCount = 16 / sizeof(Storage);
  Storage of[kCount];
};

template <typename Element, bool kMean, typename Value>
constexpr inline typename Element::Storage reduced(typename Element::Storage a, typename Element::Storage b,
                                                   const arithmetic::Divisor<Value>& mean) {
  const Value sum = arithmetic::sum_of(Element::load(a), Element::load(b));
  if constexpr (kMean) return Element::store(mean(sum));
  else return Element::store(sum);
}

// This thread's part of a work. What lies at multiples of 16 in all three goes in vectors, several loads in flight; the
// rest, at the ends or everywhere, by elements.
template <typename Element, bool kMean, typename Machine>
constexpr inline void add_share(Machine& m, const Work& work) {
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  using L = Lanes<Storage>;
  constexpr unsigned kUnroll = 4;
  const arithmetic::Divisor<Value> mean(kMean ? work.divisor : 1);
  const std::uint64_t size = sizeof(Storage);
  const auto one = [&](std::uint64_t i) {
    const Storage a = m.template load<Storage>(work.a + i * size), b = m.template load<Storage>(work.b + i * size);
    m.store(work.out + i * size, reduced<Element, kMean>(a, b, mean));
  };
  const std::uint64_t threads = std::uint64_t{m.threads()} * m.blocks();
  const std::uint64_t self = std::uint64_t{m.block()} * m.threads() + m.thread();
  std::uint64_t head = work.count, vectors = 0;
  if (((work.a ^ work.b) & 15) == 0 && ((work.a ^ work.out) & 15) == 0 && work.a % size == 0) {
    head = (16 - (work.a & 15)) % 16 / size;
    head = head < work.count ? head : work.count;
    vectors = (work.count - head) / L::kCount;
  }
  for (std::uint64_t i = self; i < head; i += threads) one(i);
  const std::uint64_t begin = head * size, tile = std::uint64_t{m.threads()} * kUnroll;
  const auto vector = [&](std::uint64_t address, std::uint64_t i) {
    return std::bit_cast<L>(m.template load<Vector>(address + begin + 16 * i));
  };
  const auto put = [&](std::uint64_t i, const L& a, const L& b) {
    L sum;
    m.template unrolled<L::kCount>([&](unsigned e) { sum.of[e] = reduced<Element, kMean>(a.of[e], b.of[e], mean); });
    m.store(work.out + begin + 16 * i, std::bit_cast<Vector>(sum));
  };
  const std::uint64_t whole = vectors - vectors % tile;
  for (std::uint64_t base = m.block() * tile + m.thread(); base < whole; base += tile * m.blocks()) {
    L a[kUnroll], b[kUnroll];
    m.template unrolled<kUnroll>([&](unsigned u) {
      a[u] = vector(work.a, base + u * m.threads());
      b[u] = vector(work.b, base + u * m.threads());
    });
    m.template unrolled<kUnroll>([&](unsigned u) { put(base + u * m.threads(), a[u], b[u]); });
  }
  for (std::uint64_t i = whole + self; i < vectors; i += threads) put(i, vector(work.a, i), vector(work.b, i));
  for (std::uint64_t i = head + vectors * L::kCount + self; i < work.count; i += threads) one(i);
}

template <typename Machine>
constexpr inline void copy_share(Machine& m, const Work& work) {
  constexpr unsigned kUnroll = 8;
  const std::uint64_t threads = std::uint64_t{m.threads()} * m.blocks();
  const std::uint64_t self = std::uint64_t{m.block()} * m.threads() + m.thread();
  const auto one = [&](std::uint64_t i) { m.store(work.out + i, m.template load<std::uint8_t>(work.a + i)); };
  std::uint64_t head = work.count, vectors = 0;
  if (((work.a ^ work.out) & 15) == 0) {
    head = (16 - (work.a & 15)) % 16;
    head = head < work.count ? head : work.count;
    vectors = (work.count - head) / 16;
  }
  for (std::uint64_t i = self; i < head; i += threads) one(i);
  const std::uint64_t tile = std::uint64_t{m.threads()} * kUnroll, whole = vectors - vectors % tile;
  const auto from = [&](std::uint64_t i) { return m.template load<Vector>(work.a + head + 16 * i); };
  for (std::uint64_t base = m.block() * tile + m.thread(); base < whole; base += tile * m.blocks()) {
    Vector some[kUnroll];
    m.template unrolled<kUnroll>([&](unsigned u) { some[u] = from(base + u * m.threads()); });
    m.template unrolled<kUnroll>(
        [&](unsigned u) { m.store(work.out + head + 16 * (base + u * m.threads()), some[u]); });
  }
  for (std::uint64_t i = whole + self; i < vectors; i += threads) m.store(work.out + head + 16 * i, from(i));
  for (std::uint64_t i = head + vectors * 16 + self; i < work.count; i += threads) one(i);
}

// What a launch does: works as they are posted, until it is told to leave or nothing has come for its patience.
template <typename Machine>
constexpr inline void serve(Machine& m, const ReduceArguments& arguments) {
  Mailbox& box = *arguments.mailbox;
  Mailbox::Block& mine = box.blocks[m.block()];
  // What one thread of the block has seen: works up to `posted`, and the next of them, which is on its way here over
  // PCIe while the one before is added.
  std::uint64_t posted = 0;
  Work ahead;
  for (std::uint64_t next = mine.done + 1;; ++next) {
    // That thread waits, and tells the others what is to be done.
    const auto* work = m.for_all([&](Work& found) {
      found = ahead;
      if (posted < next) {
        const std::uint64_t since = m.now();
        while ((posted = m.acquire(box.posted)) < next) {
          if (m.acquire(box.leave) >= arguments.launch || m.now() - since >= arguments.patience_ns) return false;
          m.relax();
        }
        found = box.works[next % Mailbox::kWorks];
      }
      if (posted > next) ahead = box.works[(next + 1) % Mailbox::kWorks];
      return true;
    });
    if (work == nullptr) break;
    const Work now = m.translated(*work);
    if (now.type == Work::kCopy) {
      copy_share(m, now);
    } else {
      arithmetic::dispatch(static_cast<DataType>(now.type), [&](auto element) {
        if (now.divisor > 1) add_share<decltype(element), true>(m, now);
        else add_share<decltype(element), false>(m, now);
      });
    }
    m.finish([&] { m.release(mine.done, next); });
  }
  m.finish([&] { m.release(mine.left, arguments.launch); });
}

}  // namespace rejoin::device::kernels
