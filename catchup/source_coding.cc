// A source's parts, coded where that pays.
#include <algorithm>

#include "catchup/source.h"

namespace rejoin::catchup {

namespace {

constexpr std::uint32_t kSlots = 16;              // coded parts on their way
constexpr std::uint64_t kSampleBytes = 16 * KiB;  // of each column

}  // namespace

// Codes the columns that shrink. False: not now (no slot, or an update got in between), to be tried again.
bool Source::encode(PartJob& part) {
  if (slots_.size() == 0) {
    auto slots = Mapping::shareable(kSlots * local::kPartBytes);
    if (!slots) return true;  // no memory: plain
    auto region = engine_.register_region(slots->span(), transport::MemoryKind::host, transport::Access::local);
    if (!region) return true;
    slots_ = std::move(*slots);
    slots_region_ = *region;
    for (std::uint32_t i = 0; i < kSlots; ++i) free_slots_.push_back(i);
  }
  if (!part.slot && free_slots_.empty()) return false;
  if (!part.slot) part.slot = free_slots_.back(), free_slots_.pop_back();
  const auto& manifest = memory_.view->manifest();
  const TimePoint start = clock_.now();
  std::uint64_t at = *part.slot * local::kPartBytes, plain = 0, coded = 0;
  bool all = true;
  for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[part.pinned.part]); ++c) {
    const BytesView bytes = memory_.view->column(part.pinned, c, part.from_shadow);
    plain_.resize(bytes.size());
    memory_.view->read(bytes, plain_.data());
    const auto length = coder_.encode(plain_, slots_.span().subspan(at, bytes.size()));
    part.coded[c] = static_cast<std::uint32_t>(length.value_or(0));
    all = all && length.has_value();
    at += bytes.size();
    plain += bytes.size();
    coded += length.value_or(bytes.size());
  }
  decision_.on_coded(plain, coded, clock_.now() - start);
  // What was coded from the state is the pinned version's only if no update has begun.
  if (!part.from_shadow && memory_.view->where(part.pinned) != local::View::Where::state) return false;
  part.detached = all;
  if (all) memory_.view->release(part.pinned);
  return true;
}

void Source::sample(const PartJob& part) {
  const auto& manifest = memory_.view->manifest();
  Bytes out(kSampleBytes);
  std::uint64_t plain = 0, coded = 0;
  const TimePoint start = clock_.now();
  for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[part.pinned.part]); ++c) {
    BytesView bytes = memory_.view->column(part.pinned, c, part.from_shadow);
    bytes = bytes.subspan(bytes.size() / 2);
    bytes = bytes.first(std::min<std::uint64_t>(bytes.size(), kSampleBytes));
    plain += bytes.size();
    plain_.resize(bytes.size());
    memory_.view->read(bytes, plain_.data());
    coded += coder_.encode(plain_, out).value_or(bytes.size());
  }
  if (plain > 0) decision_.on_coded(plain, coded, clock_.now() - start);
}

}  // namespace rejoin::catchup
