// The body of a pass (base/coded_chunk.h), for whatever runs it, with the bits of the CPU's (ftar/coding.cc). A block
// has four parts, of 16 bytes of elements each. Where a warp has many lanes, four of them share a block, a part each;
// the only lane of a CPU's has all four (Machine::parts()).
#pragma once

#include <algorithm>

#include "base/block_float.h"
#include "base/coded_chunk.h"
#include "device/kernels/mailbox.h"
#include "device/kernels/vector.h"

namespace rejoin::device::kernels {

// What all tiles of a work have lost, to the CPU; nothing for the next work of this place.
template <typename Machine>
REJOIN_INLINE void hand_over(Machine& m, coding::Loss& told, coding::Loss& to) {
  m.store(address_of(to), m.template load<Vector>(address_of(told)));
  m.store(address_of(told), Vector{});
}

// What a lane's elements have lost, as coding::Loss.
struct Share {
  float lost = 0, of = 0;
};

template <typename Element, typename Machine>
class PassOf {
  using Storage = typename Element::Storage;
  using Width = coding::Width;
  using Part = Lanes<Storage>;
  static constexpr unsigned kParts = Machine::parts(), kSharers = 4 / kParts;
  static constexpr unsigned kCount = Part::kCount, kWords = kCount / 4;  // … of numbers, a byte each
  static constexpr unsigned kInFlight = 2;                               // blocks of a lane

  // What a lane has of a block, as it is loaded.
  struct Given {
    Part own[kParts] = {}, feedback[kParts] = {};
    Vector arrived[kParts] = {};  // elements, or words of numbers
    std::uint32_t scale = 0;      // … and theirs
  };

 public:
  REJOIN_INLINE PassOf(Machine& m, const coding::Pass& pass)
      : m_(m),
        pass_(pass),
        blocks_(coding::blocks_of(pass.count * sizeof(Storage))),
        divisor_(pass.divisor > 1 ? static_cast<float>(pass.divisor) : 1.0f),
        reciprocal_(1.0f / divisor_) {
    std::uint64_t all = address(pass.own) | address(pass.feedback) | address(pass.residual) | address(pass.out);
    if (pass.arrived_width == Width::plain) all |= address(pass.arrived);
    in_vectors_ = all % sizeof(Vector) == 0;
  }

  // Blocks `from` to `end` - 1. The lanes meet between loads and what is made of them, as in_groups() does it.
  REJOIN_INLINE void run(std::uint64_t from, std::uint64_t end, Share& share) {
    const std::uint64_t at_once = m_.lanes() / kSharers;
    for (std::uint64_t at = from + m_.lane() / kSharers; at - m_.lane() / kSharers < end; at += kInFlight * at_once) {
      Given given[kInFlight];
      m_.template unrolled<kInFlight>([&](unsigned u) {
        if (at + u * at_once < end) load(given[u], at + u * at_once);
      });
      m_.meet();
      m_.template unrolled<kInFlight>([&](unsigned u) { block(given[u], at + u * at_once, end, share); });
    }
  }

 private:
  REJOIN_INLINE static std::uint64_t address(const std::byte* bytes) { return reinterpret_cast<std::uint64_t>(bytes); }
  REJOIN_INLINE unsigned part_of(unsigned p) const { return kParts == 1 ? m_.lane() % 4 : p; }
  // Of a block's part: its first element, and how many of it there are.
  REJOIN_INLINE std::uint64_t first(std::uint64_t block, unsigned p) const { return (block * 4 + part_of(p)) * kCount; }
  REJOIN_INLINE std::uint64_t elements(std::uint64_t first) const {
    return first >= pass_.count ? 0 : std::min<std::uint64_t>(kCount, pass_.count - first);
  }

  REJOIN_INLINE Part load(const std::byte* from, std::uint64_t first) const {
    const std::uint64_t at = address(from) + first * sizeof(Storage), count = elements(first);
    if (in_vectors_ && count == kCount) return std::bit_cast<Part>(m_.template load<Vector>(at));
    Part part{};
    m_.template unrolled<kCount>([&](unsigned e) {
      if (e < count) part.of[e] = m_.template load<Storage>(at + e * sizeof(Storage));
    });
    return part;
  }
  REJOIN_INLINE void store(std::byte* to, std::uint64_t first, const Part& part) const {
    const std::uint64_t at = address(to) + first * sizeof(Storage), count = elements(first);
    if (in_vectors_ && count == kCount) return m_.store(at, std::bit_cast<Vector>(part));
    m_.template unrolled<kCount>([&](unsigned e) {
      if (e < count) m_.store(at + e * sizeof(Storage), part.of[e]);
    });
  }

  // A coded chunk is anywhere, byte by byte.
  REJOIN_INLINE std::uint32_t load_bytes(std::uint64_t at, unsigned count) const {
    if (count == 4 && at % 4 == 0) return m_.template load<std::uint32_t>(at);
    std::uint32_t bytes = 0;
    for (unsigned i = 0; i < count; ++i) bytes |= std::uint32_t{m_.template load<std::uint8_t>(at + i)} << (8 * i);
    return bytes;
  }
  REJOIN_INLINE void store_bytes(std::uint64_t at, unsigned count, std::uint32_t bytes) const {
    if (count == 4 && at % 4 == 0) return m_.store(at, bytes);
    for (unsigned i = 0; i < count; ++i) m_.store(at + i, static_cast<std::uint8_t>(bytes >> (8 * i)));
  }
  REJOIN_INLINE std::uint64_t scale_at(const std::byte* coded, Width width, std::uint64_t block) const {
    return address(coded) + block * coding::bytes_of_scale(width);
  }
  // Of 4 bits two parts share their bytes.
  REJOIN_INLINE std::uint64_t numbers_at(const std::byte* coded, Width width, std::uint64_t block,
                                         unsigned part) const {
    const bool four = width == Width::four;
    return address(coded) + blocks_ * coding::bytes_of_scale(width) + block * (four ? 2 : 4) * kCount +
           (four ? part % 2 : part) * kCount;
  }

  REJOIN_INLINE void load(Given& given, std::uint64_t block) const {
    if (pass_.arrived != nullptr && pass_.arrived_width != Width::plain)
      given.scale = load_bytes(scale_at(pass_.arrived, pass_.arrived_width, block),
                               static_cast<unsigned>(coding::bytes_of_scale(pass_.arrived_width)));
    m_.template unrolled<kParts>([&](unsigned p) {
      if (pass_.own != nullptr) given.own[p] = load(pass_.own, first(block, p));
      if (pass_.feedback != nullptr) given.feedback[p] = load(pass_.feedback, first(block, p));
      if (pass_.arrived == nullptr) return;
      if (pass_.arrived_width == Width::plain) {
        given.arrived[p] = std::bit_cast<Vector>(load(pass_.arrived, first(block, p)));
        return;
      }
      const std::uint64_t at = numbers_at(pass_.arrived, pass_.arrived_width, block, part_of(p));
      m_.template unrolled<kWords>([&](unsigned w) { given.arrived[p].words[w] = load_bytes(at + 4 * w, 4); });
    });
  }

  template <unsigned kBits>
  REJOIN_INLINE void decode(float* values, const Given& given, bool& finite) const {
    finite = given.scale != block_float::kNotFinite<kBits>;
    const float scale = block_float::scale<kBits>(given.scale);
    m_.template unrolled<kParts>([&](unsigned p) {
      const unsigned half = kBits == 4 && part_of(p) >= 2 ? 4 : 0;
      m_.template unrolled<kCount>([&](unsigned e) {
        const std::uint32_t shifted = given.arrived[p].words[e / 4] >> (8 * (e % 4) + half);
        const int code = static_cast<int>(shifted << (32 - kBits)) >> (32 - kBits);
        values[p * kCount + e] = finite ? static_cast<float>(code) * scale : block_float::decoded_not_finite(code);
      });
    });
  }

  // `values` become what is decoded of them.
  template <unsigned kBits>
  REJOIN_INLINE void code(float* values, std::uint64_t block, bool here, bool& finite) const {
    std::uint32_t largest = 0;
    m_.template unrolled<kParts * kCount>(
        [&](unsigned i) { largest = std::max(largest, block_float::magnitude(values[i])); });
    const std::uint32_t most = m_.most_of_block(largest), word = block_float::scale_word<kBits>(most);
    if constexpr (block_float::kTopIsRoundedUp<Element, kBits>)
      if (most >= block_float::kTop)
        m_.template unrolled<kParts * kCount>([&](unsigned i) { values[i] = block_float::below_top(values[i]); });
    finite = word != block_float::kNotFinite<kBits>;
    const float scale = block_float::scale<kBits>(word), inverse = block_float::inverse<kBits>(word);
    std::uint32_t numbers[kParts * kWords] = {};
    m_.template unrolled<kParts * kCount>([&](unsigned i) {
      std::uint32_t number = 0;
      if (finite) {
        block_float::code(values[i], inverse);
        number = std::bit_cast<std::uint32_t>(values[i]);
        block_float::decode(values[i], scale);
      } else {
        const int sign = block_float::coded_not_finite<kBits>(values[i]);
        number = static_cast<std::uint32_t>(sign);
        values[i] = block_float::decoded_not_finite(sign);
      }
      numbers[i / 4] |= (number & ((1u << kBits) - 1)) << (8 * (i % 4));
    });
    std::uint32_t others[kParts * kWords];
    if constexpr (kBits == 4) {
      m_.template unrolled<kParts * kWords>([&](unsigned w) { others[w] = numbers[w]; });
      m_.swap_halves(others);
      m_.template unrolled<kParts * kWords>([&](unsigned w) { numbers[w] |= others[w] << 4; });
    }
    if (!here) return;
    constexpr Width width = kBits == 8 ? Width::eight : Width::four;
    m_.template unrolled<kParts>([&](unsigned p) {
      const unsigned part = part_of(p);
      if (part == 0)
        store_bytes(scale_at(pass_.coded, width, block), static_cast<unsigned>(coding::bytes_of_scale(width)), word);
      if (kBits == 4 && part >= 2) return;
      const std::uint64_t at = numbers_at(pass_.coded, width, block, part);
      m_.template unrolled<kWords>([&](unsigned w) { store_bytes(at + 4 * w, 4, numbers[p * kWords + w]); });
    });
  }

  // A NaN that has been coded has the same bits everywhere, also where a machine's own instructions make others: so
  // what is decoded alone goes through none.
  REJOIN_INLINE Storage stored(float value, bool finite) const {
    return finite ? m_.template stored<Element>(value) : Element::store(value);
  }
  template <typename Value>
  REJOIN_INLINE void store_all(std::byte* to, std::uint64_t block, bool finite, Value value) const {
    m_.template unrolled<kParts>([&](unsigned p) {
      Part part;
      m_.template unrolled<kCount>([&](unsigned e) { part.of[e] = stored(value(p, e), finite); });
      store(to, first(block, p), part);
    });
  }

  REJOIN_INLINE void block(const Given& given, std::uint64_t block, std::uint64_t end, Share& share) const {
    const bool here = block < end;
    bool finite = true, known = true;
    float values[kParts * kCount] = {};
    if (pass_.arrived_width == Width::eight) decode<8>(values, given, known);
    if (pass_.arrived_width == Width::four) decode<4>(values, given, known);
    const auto before = [&](unsigned p, unsigned e) {
      return m_.template value<Element>(given.feedback[p].of[e]) * pass_.times;
    };
    m_.template unrolled<kParts>([&](unsigned p) {
      const Part arrived = std::bit_cast<Part>(given.arrived[p]);
      m_.template unrolled<kCount>([&](unsigned e) {
        float& value = values[p * kCount + e];
        if (pass_.arrived != nullptr && pass_.arrived_width == Width::plain)
          value = m_.template value<Element>(arrived.of[e]);
        if (pass_.own != nullptr) {
          const float own = m_.template value<Element>(given.own[p].of[e]);
          value = pass_.arrived != nullptr ? value + own : own;
        }
        if (pass_.feedback != nullptr) value += before(p, e);
        if (divisor_ != 1) value = m_.product(value, reciprocal_);
      });
    });
    float wanted[kParts * kCount];
    m_.template unrolled<kParts * kCount>([&](unsigned i) { wanted[i] = values[i]; });
    if (pass_.width == Width::eight) code<8>(values, block, here, finite);
    if (pass_.width == Width::four) code<4>(values, block, here, finite);
    if (!here) return;
    if (pass_.out != nullptr)
      store_all(pass_.out, block, finite && known, [&](unsigned p, unsigned e) { return values[p * kCount + e]; });
    if (pass_.width == Width::plain) {
      if (pass_.residual != nullptr) store_all(pass_.residual, block, true, [](unsigned, unsigned) { return 0.0f; });
      return;
    }
    if (finite)
      m_.template unrolled<kParts * kCount>([&](unsigned i) {
        const float lost = wanted[i] - values[i];
        share.of += wanted[i] * wanted[i];
        share.lost += lost * lost;
      });
    if (pass_.residual == nullptr) return;
    store_all(pass_.residual, block, finite, [&](unsigned p, unsigned e) {
      const unsigned i = p * kCount + e;
      const float lost = finite ? (wanted[i] - values[i]) * divisor_ : before(p, e);
      return std::clamp(lost, -Element::kMost, Element::kMost);
    });
  }

  Machine& m_;
  const coding::Pass& pass_;
  const std::uint64_t blocks_;
  const float divisor_, reciprocal_;
  bool in_vectors_ = false;
};

template <typename Element, typename Machine>
REJOIN_INLINE void pass_blocks(Machine& m, const Work& work, const coding::Pass& pass, std::uint64_t tile,
                               coding::Loss& loss) {
  const std::uint64_t all = coding::blocks_of(pass.count * sizeof(typename Element::Storage));
  const std::uint64_t each = work.tile / coding::kPlainBlock, from = tile * each;
  Share share;
  PassOf<Element, Machine>(m, pass).run(from, std::min(all, from + each), share);
  if (pass.width == coding::Width::plain) return;
  const float lost = m.sum(share.lost), of = m.sum(share.of);
  if (m.lane() != 0) return;
  m.accumulate(loss.lost, lost);
  m.accumulate(loss.of, of);
}

template <typename Machine>
REJOIN_INLINE void pass_tile(Machine& m, const Work& work, const coding::Pass& pass, std::uint64_t tile,
                             coding::Loss& loss) {
  using namespace arithmetic;
  if (pass.type == DataType::float32) pass_blocks<Plain<float>>(m, work, pass, tile, loss);
  else if (pass.type == DataType::bfloat16) pass_blocks<Bfloat16>(m, work, pass, tile, loss);
  else pass_blocks<Float16>(m, work, pass, tile, loss);
}

}  // namespace rejoin::device::kernels
