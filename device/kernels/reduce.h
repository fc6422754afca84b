// The body of the reduce kernel, for whatever runs it: a GPU (kernels.cu), or threads of a CPU (tests/fake_kernels.cc).
// The Machine says which lane of a warp this is and what warps there are, how memory is reached that the CPU, a NIC
// or other warps write meanwhile, and whether passes are among the works (kCodes). A CPU's warps have one lane.
// The CPU-driven ring with the GPU as its arithmetic follows FT-HSDP's FTAR (arXiv 2602.00277) and NCCLX's (arXiv
// 2510.20171): fixed chunks, a kernel per operation, flags in pinned memory.
#pragma once

#include "base/arithmetic.h"
#include "device/kernels/code.h"
#include "device/kernels/mailbox.h"
#include "device/kernels/vector.h"

namespace rejoin::device::kernels {

template <typename Element, bool kMean, typename Machine, typename Value>
REJOIN_INLINE typename Element::Storage reduced(Machine& m, typename Element::Storage a, typename Element::Storage b,
                                                const arithmetic::Divisor<Value>& mean) {
  const Value sum = arithmetic::sum_of<Value>(m.template value<Element>(a), m.template value<Element>(b));
  if constexpr (kMean) return m.template stored<Element>(arithmetic::one_nan(mean(sum)));
  else return m.template stored<Element>(arithmetic::one_nan(sum));
}

// Items `from` to count - 1, shared among the lanes, with loads of several in flight: what `load` gives `put` gets. The
// lanes meet between, so that a compiler leaves the loads together.
template <unsigned kInFlight, typename Machine, typename Load, typename Put>
REJOIN_INLINE void in_groups(Machine& m, std::uint64_t from, std::uint64_t count, Load load, Put put) {
  for (; from + kInFlight * m.lanes() <= count; from += kInFlight * m.lanes()) {
    decltype(load(from)) items[kInFlight];
    m.template unrolled<kInFlight>([&](unsigned u) { items[u] = load(from + u * m.lanes() + m.lane()); });
    m.meet();
    m.template unrolled<kInFlight>([&](unsigned u) { put(from + u * m.lanes() + m.lane(), items[u]); });
  }
  if constexpr (kInFlight > 2) in_groups<2>(m, from, count, load, put);
  else
    for (std::uint64_t i = from + m.lane(); i < count; i += m.lanes()) put(i, load(i));
}

// Where the parts of a tile begin, in elements of `size` bytes: what goes one by one, then what goes in units of `wide`
// bytes (0: nothing does), then one by one again.
struct Parts {
  std::uint64_t begin = 0, units = 0, rest = 0, end = 0;
};
constexpr inline Parts parts_of(const Work& work, std::uint64_t tile, std::uint64_t size, std::uint64_t wide) {
  const std::uint64_t each = work.tile / size, head = wide == 0 ? 0 : (wide - work.a % wide) % wide / size;
  const auto border = [&](std::uint64_t t) {
    const std::uint64_t at = t == 0 ? 0 : head + t * each;
    return t == work.tiles || at > work.count ? work.count : at;
  };
  Parts parts{.begin = border(tile), .end = border(tile + 1)};
  const std::uint64_t first = tile == 0 ? head : parts.begin;
  parts.units = wide == 0 || first > parts.end ? parts.end : first;
  parts.rest = wide == 0 ? parts.end : parts.units + (parts.end - parts.units) * size / wide * wide / size;
  return parts;
}

// Those that go one by one, by number.
constexpr inline std::uint64_t singles(const Parts& parts) {
  return parts.units - parts.begin + parts.end - parts.rest;
}
constexpr inline std::uint64_t single(const Parts& parts, std::uint64_t number) {
  const std::uint64_t before = parts.units - parts.begin;
  return number < before ? parts.begin + number : parts.rest + (number - before);
}

constexpr unsigned kVectorsInFlight = 8, kSinglesInFlight = 4;

// What lies at the same distance to multiples of 16 in all three goes in vectors.
template <typename Element, bool kMean, typename Machine>
REJOIN_INLINE void add_tile(Machine& m, const Work& work, std::uint64_t tile) {
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  using L = Lanes<Storage>;
  constexpr std::uint64_t size = sizeof(Storage);
  const arithmetic::Divisor<Value> mean(kMean ? work.divisor : 1);
  const bool together = ((work.a ^ work.b) & 15) == 0 && ((work.a ^ work.out) & 15) == 0 && work.a % size == 0;
  const Parts parts = parts_of(work, tile, size, together ? sizeof(Vector) : 0);
  struct Vectors {
    Vector a, b;
  };
  const std::uint64_t at = parts.units * size;
  in_groups<kVectorsInFlight>(
      m, 0, (parts.rest - parts.units) * size / sizeof(Vector),
      [&](std::uint64_t i) {
        return Vectors{m.template load<Vector>(work.a + at + i * sizeof(Vector)),
                       m.template load<Vector>(work.b + at + i * sizeof(Vector))};
      },
      [&](std::uint64_t i, const Vectors& vectors) {
        const L a = std::bit_cast<L>(vectors.a), b = std::bit_cast<L>(vectors.b);
        L sum;
        m.template unrolled<L::kCount>(
            [&](unsigned e) { sum.of[e] = reduced<Element, kMean>(m, a.of[e], b.of[e], mean); });
        m.store(work.out + at + i * sizeof(Vector), std::bit_cast<Vector>(sum));
      });
  struct Two {
    Storage a, b;
  };
  in_groups<kSinglesInFlight>(
      m, 0, singles(parts),
      [&](std::uint64_t i) {
        const std::uint64_t from = single(parts, i) * size;
        return Two{m.template load<Storage>(work.a + from), m.template load<Storage>(work.b + from)};
      },
      [&](std::uint64_t i, const Two& two) {
        m.store(work.out + single(parts, i) * size, reduced<Element, kMean>(m, two.a, two.b, mean));
      });
}

template <typename Wide, typename Machine>
REJOIN_INLINE void copy_in(Machine& m, const Work& work, std::uint64_t tile) {
  const Parts parts = parts_of(work, tile, 1, sizeof(Wide));
  in_groups<kVectorsInFlight>(
      m, 0, (parts.rest - parts.units) / sizeof(Wide),
      [&](std::uint64_t i) { return m.template load<Wide>(work.a + parts.units + i * sizeof(Wide)); },
      [&](std::uint64_t i, const Wide& wide) { m.store(work.out + parts.units + i * sizeof(Wide), wide); });
  in_groups<1>(
      m, 0, singles(parts), [&](std::uint64_t i) { return m.template load<std::uint8_t>(work.a + single(parts, i)); },
      [&](std::uint64_t i, std::uint8_t byte) { m.store(work.out + single(parts, i), byte); });
}

template <typename Machine>
REJOIN_INLINE void copy_tile(Machine& m, const Work& work, std::uint64_t tile) {
  const std::uint64_t apart = work.a ^ work.out;
  if (apart % sizeof(Vector) == 0) copy_in<Vector>(m, work, tile);
  else if (apart % sizeof(std::uint32_t) == 0) copy_in<std::uint32_t>(m, work, tile);
  else copy_in<std::uint8_t>(m, work, tile);
}

template <typename Machine>
REJOIN_INLINE void do_tile(Machine& m, Relay& relay, const Work& work, std::uint64_t number, std::uint64_t tile) {
  if (work.type == Work::kCopy) return copy_tile(m, work, tile);
  if constexpr (Machine::kCodes) {
    const std::uint64_t slot = number % Mailbox::kWorks;
    if (work.type == Work::kPass) return pass_tile(m, work, m.pass(relay.passes[slot]), tile, relay.losses[slot]);
  }
  arithmetic::dispatch(
      static_cast<DataType>(work.type), [&](auto element) __attribute__((always_inline)) {
        if (work.divisor > 1) add_tile<decltype(element), true>(m, work, tile);
        else add_tile<decltype(element), false>(m, work, tile);
      });
}

// The one warp that looks at the CPU's page: it passes works on as they are posted, until it has to leave or
// nothing has come for its patience.
template <typename Machine>
REJOIN_INLINE void watch(Machine& m, const ReduceArguments& arguments) {
  Mailbox& box = *arguments.mailbox;
  Relay& relay = *arguments.relay;
  constexpr std::uint64_t kWork = sizeof(Work) / sizeof(Vector), kTiles = offsetof(Work, first) / sizeof(Vector);
  constexpr std::uint64_t kVectors = kWork + (Machine::kCodes ? sizeof(coding::Pass) / sizeof(Vector) : 0);
  std::uint64_t passed = m.peek(relay.works), tiles = m.peek(relay.tiles);
  for (std::uint64_t since = m.one([&] { return m.now(); });;) {
    auto [posted, leave] = m.both(box.posted, box.leave);
    if (posted == passed) {
      const std::uint64_t idle = m.one([&] { return m.now(); }) - since;
      if (leave < arguments.launch && idle < arguments.patience_ns) {
        m.relax(0);
        continue;
      }
      posted = m.one([&] { return m.acquire(box.posted); });  // works posted before it had to leave are done
      if (posted == passed) break;
    }
    std::uint32_t more = 0;
    for (std::uint64_t i = m.lane(); i < (posted - passed) * kVectors; i += m.lanes()) {
      const std::uint64_t slot = (passed + 1 + i / kVectors) % Mailbox::kWorks, part = i % kVectors;
      if (part >= kWork) {
        const std::uint64_t at = (part - kWork) * sizeof(Vector);
        m.store(address_of(relay.passes[slot]) + at, m.template load<Vector>(address_of(box.passes[slot]) + at));
        continue;
      }
      const auto vector = m.template load<Vector>(address_of(box.works[slot]) + part * sizeof(Vector));
      m.store(address_of(relay.passed[slot]) + part * sizeof(Vector), vector);
      if (part != kTiles) continue;
      const std::uint64_t first = vector.words[0] | std::uint64_t{vector.words[1]} << 32;
      m.poke(relay.firsts[slot], first);
      more = static_cast<std::uint32_t>(first + vector.words[2] - tiles);
    }
    tiles += m.most(more);
    m.meet();
    if (m.lane() == 0) {
      m.release_device(relay.works, posted);
      m.release_device(relay.tiles, tiles);
    }
    passed = posted;
    since = m.one([&] { return m.now(); });
  }
  if (m.lane() == 0) m.release_device(relay.tiles, tiles | Relay::kClosed);
}

// The work that a tile belongs to, as soon as it has been passed on; 0: the launch is over, and it never came. Whatever
// is read of works before that one may be overwritten meanwhile, and points to no later one.
template <typename Machine>
constexpr inline std::uint64_t work_of(Machine& m, Relay& relay, std::uint64_t tile) {
  for (constexpr std::uint32_t near = 20, far = 4000;;) {
    const std::uint64_t come = m.one([&] { return m.acquire_device(relay.tiles); });
    const std::uint64_t known = come & ~Relay::kClosed;
    if (known > tile) break;
    if (come != known) return 0;
    // Nanoseconds: who is not next in line looks the less often.
    m.relax(tile - known < far ? near + static_cast<std::uint32_t>(tile - known) : far);
  }
  const std::uint64_t last = m.one([&] { return m.acquire_device(relay.works); });
  std::uint32_t back = Mailbox::kWorks;
  for (std::uint32_t i = m.lane(); i < Mailbox::kWorks && i < last && back > i; i += m.lanes())
    if (m.peek(relay.firsts[(last - i) % Mailbox::kWorks]) <= tile) back = i;
  return last - m.least(back);
}

// What every other warp of a launch does: tiles of works, the next one claimed while it works at one.
template <typename Machine>
REJOIN_INLINE void serve(Machine& m, const ReduceArguments& arguments) {
  Mailbox& box = *arguments.mailbox;
  Relay& relay = *arguments.relay;
  Work work;  // at hand
  std::uint64_t number = 0;
  std::uint32_t did = 0;
  for (std::uint64_t tile = m.one([&] { return m.claim(relay.claimed); });;) {
    if (tile - work.first >= work.tiles) {
      if (did > 0)
        m.from_first([&] {
          const std::uint64_t slot = number % Mailbox::kWorks;
          if (m.add(relay.finished[slot], did) + did != work.tiles) return;
          m.poke(relay.finished[slot], 0);
          if constexpr (Machine::kCodes)
            if (work.type == Work::kPass) hand_over(m, relay.losses[slot], box.losses[slot]);
          m.release(box.done[slot], number);
        });
      did = 0;
      number = work_of(m, relay, tile);
      if (number == 0) break;
      work = m.work(relay.passed[number % Mailbox::kWorks]);
    }
    std::uint64_t next = 0;
    if (m.lane() == 0) next = m.claim(relay.claimed);
    do_tile(m, relay, work, number, tile - work.first);
    ++did;
    tile = m.of_first(next);
  }
  m.from_first([&] {
    if (m.add(relay.left, 1) + 1 != m.workers()) return;
    const std::uint64_t tiles = m.peek(relay.tiles) & ~Relay::kClosed;
    m.poke(relay.left, 0);
    m.poke(relay.claimed, tiles);
    m.poke(relay.tiles, tiles);
    m.release(box.left, arguments.launch);
  });
}

}  // namespace rejoin::device::kernels
