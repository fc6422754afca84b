#include "sim/coded_ring.h"

#include <algorithm>

#include "ftar/reduce.h"
#include "ftar/schedule.h"

namespace rejoin::sim {

namespace {

using ftar::Coding;
using ftar::coding::Width;

bool hop_codes(const CodedRing::Member& from, const CodedRing::Member& to) {
  return from.coding != Coding::off && to.coding != Coding::off;
}

// Whether one of those to whom it sends anything is sent coded chunks.
bool codes_at_all(const std::vector<CodedRing::Member>& ring, std::size_t contributors, std::size_t at) {
  const std::size_t members = ring.size();
  if (contributors > 1 && hop_codes(ring[at], ring[(at + 1) % contributors])) return true;
  return members > 1 &&
         (hop_codes(ring[at], ring[(at + 1) % members]) || hop_codes(ring[at], ring[(at + members - 1) % members]));
}

const std::byte* bytes_at(const std::vector<float>& values, const ftar::Range& range) {
  return values.empty() ? nullptr : reinterpret_cast<const std::byte*>(values.data()) + range.offset;
}
std::byte* bytes_at(std::vector<float>& values, const ftar::Range& range) {
  return reinterpret_cast<std::byte*>(values.data()) + range.offset;
}

}  // namespace

std::vector<float> CodedRing::mean(std::uint64_t step, std::uint32_t bucket, const std::vector<Member>& ring,
                                   const std::vector<std::vector<float>>& inputs, std::uint32_t divisor, float factor) {
  const std::size_t n = inputs.size(), count = inputs[0].size();
  std::vector<Lost> before, after(n);
  for (std::size_t p = 0; p < n; ++p) {
    Lost& known = before.emplace_back(std::move(lost_[{ring[p].process, bucket}]));
    if (known.step + 1 != step || !known.any || factor == 0) known = {};
    after[p] = {.step = step, .divisor = std::max(1u, divisor), .any = false, .values = std::vector<float>(count)};
  }
  const ftar::Schedule schedule({.bytes = count * sizeof(float),
                                 .contributors = static_cast<std::uint32_t>(n),
                                 .members = static_cast<std::uint32_t>(ring.size()),
                                 .chunk_bytes = ftar::coding::kPlainBlock});
  std::vector<float> result(count);
  for (std::uint32_t s = 0; s < n; ++s) {
    const ftar::Range range = schedule.segment(s);
    if (range.length == 0) continue;
    const std::size_t elements = range.length / sizeof(float);
    std::vector<std::byte> arrived, next(ftar::coding::coded_bytes(DataType::float32, range.length, Width::plain) + 64);
    Width form = Width::plain;
    bool over_slow = false;  // it has come over a hop that codes
    for (std::size_t k = 0; k < n; ++k) {
      const std::size_t p = (s + 1 + k) % n;
      const bool last = k + 1 == n, on = ring[p].coding != Coding::off;
      const Width own_width = ring[p].coding == Coding::four ? Width::four : Width::eight;
      over_slow = over_slow || (on && codes_at_all(ring, n, p));
      const bool to_next = !last && hop_codes(ring[p], ring[(p + 1) % n]);
      const Width width = (last ? on && over_slow : to_next) ? own_width : Width::plain;
      std::byte* out = last ? bytes_at(result, range) : next.data();
      const std::byte* own = bytes_at(inputs[p], range);
      if (!on) {  // as every member did before there was any coding
        if (k > 0) ftar::add(DataType::float32, out, arrived.data(), own, elements, last ? divisor : 0);
        else if (last && divisor > 1) ftar::add(DataType::float32, out, own, own, elements, 2 * divisor);
        else std::copy_n(own, range.length, out);
      } else {
        std::vector<std::byte> coded(range.length + 64);
        ftar::coding::Pass pass{
            .count = elements,
            .own = own,
            .arrived = k == 0 ? nullptr : arrived.data(),
            .arrived_width = form,
            .feedback = bytes_at(std::as_const(before[p].values), range),
            .times = factor * (static_cast<float>(after[p].divisor) / static_cast<float>(before[p].divisor)),
            .divisor = last ? divisor : 0,
            .width = width};
        if (width != Width::plain) {
          after[p].any = true;
          pass.residual = bytes_at(after[p].values, range);
          pass.coded = coded.data();
        }
        if (width == Width::plain || last) pass.out = out;
        (void)ftar::coding::run(pass);
        if (width != Width::plain && !last) next = std::move(coded);
      }
      arrived = std::exchange(next, std::vector<std::byte>(range.length + 64));
      form = width;
      if (!on) over_slow = false;  // it does not pass on what it has not been told
    }
  }
  for (std::size_t p = 0; p < n; ++p) lost_[{ring[p].process, bucket}] = std::move(after[p]);
  return result;
}

}  // namespace rejoin::sim
