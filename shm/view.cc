#include "shm/view.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/digest.h"
#include "shm/owner.h"

namespace rejoin::shm {

namespace {
constexpr std::uint64_t pin_bit(std::uint32_t pin) { return std::uint64_t{1} << pin; }
}  // namespace

Result<View> View::make(Manifest manifest, Fd state, Fd page, Fd aside, Fd doorbell,
                        std::shared_ptr<device::Device> device) {
  View view(std::move(manifest));
  const auto slices = static_cast<std::uint32_t>(view.manifest_.slices().size());
  const auto host = device::make_host();
  auto access = device::Access::make(*device);
  if (!access) return tl::unexpected(access.error());
  const auto import = [](const char* what, device::Device& of, const Fd& fd, std::size_t size, device::Memory& memory) {
    auto imported = of.import_shared(fd, size);
    if (imported) memory = std::move(*imported);
    if (imported) return Result<>();
    return Result<>(fail(imported.error().code, "the trainer's {}, of which its manifest needs {} bytes: {}", what,
                         size, imported.error().message));
  };
  for (auto imported : {import("state", *device, state, view.manifest_.state_bytes(), view.state_),
                        import("page", *host, page, page_bytes(slices), view.page_),
                        import("aside", *device, aside, aside_bytes(), view.aside_)})
    if (!imported) return tl::unexpected(imported.error());
  view.device_ = std::move(device);
  view.access_ = std::move(*access);
  if (view.page().magic != kPageMagic || view.page().layout != kLayoutVersion || view.page().slices != slices)
    return fail(ErrorCode::mismatch,
                "the trainer's page has layout {}, this daemon's is {}; use library and daemon of one version",
                view.page().layout, kLayoutVersion);
  view.doorbell_ = std::move(doorbell);
  // Pins of a daemon before us are nobody's now.
  for (auto& pin : view.page().pins) pin.state.store(PinState::free);
  return view;
}

Result<View> View::of(const Owner& owner) {
  auto state = duplicate(owner.state_fd().get()), page = duplicate(owner.page_fd().get()),
       aside = duplicate(owner.aside_fd().get()), doorbell = duplicate(owner.doorbell().get());
  for (const auto* fd : {&state, &page, &aside, &doorbell})
    if (!*fd) return tl::unexpected(fd->error());
  return make(owner.manifest(), std::move(*state), std::move(*page), std::move(*aside), std::move(*doorbell),
              owner.device());
}

bool View::set_slice(std::uint32_t i, SliceWord expected, SliceWord next) {
  std::uint64_t bits = expected.packed();
  return words()[i].compare_exchange_strong(bits, next.packed());
}

std::uint32_t View::free_pins() const {
  std::uint32_t free = 0;
  for (std::uint32_t i = 0; i < kMaxPins; ++i) free += ((taken_ | withdrawing_) >> i & 1) == 0;
  return free;
}

std::optional<std::pair<std::uint64_t, std::vector<View::Held>>> View::hold(const std::vector<std::uint32_t>& parts) {
  for (std::uint32_t i = 0; i < kMaxPins; ++i)  // those that the trainer has finished copying are free again
    if ((withdrawing_ >> i & 1) != 0 && page().pins[i].state.load() == PinState::aside) {
      page().pins[i].state.store(PinState::free);
      withdrawing_ &= ~(pin_bit(i));
    }
  const Clock before = clock();
  if (before.updating || free_pins() < parts.size()) return std::nullopt;
  std::vector<Held> held;
  for (auto part : parts) {
    std::uint32_t i = 0;
    while (((taken_ | withdrawing_) >> i & 1) != 0) ++i;
    taken_ |= pin_bit(i);
    page().pins[i].part = part;
    page().pins[i].state.store(PinState::owed);
    held.push_back({i, part});
  }
  if (clock() == before) return std::pair(before.version, std::move(held));
  // An update began meanwhile and may have missed some of them.
  for (const auto& one : held) {
    PinState expected = PinState::owed;
    taken_ &= ~(pin_bit(one.pin));
    if (!page().pins[one.pin].state.compare_exchange_strong(expected, PinState::free)) withdrawing_ |= pin_bit(one.pin);
  }
  return std::nullopt;
}

View::Where View::where(const Held& held) const {
  switch (page().pins[held.pin].state.load()) {
    case PinState::owed: return Where::state;
    case PinState::aside: return Where::aside;
    case PinState::copying:
    case PinState::free: break;
  }
  return Where::copying;
}

BytesView View::column(const Held& held, std::uint32_t column, bool aside) const {
  const Part& part = manifest_.parts()[held.part];
  const Extent extent = manifest_.extent(part, column);
  if (!aside) return BytesView(state_.bytes).subspan(extent.offset, extent.length);
  return BytesView(aside_.bytes).subspan(aside_offset(held) + column * manifest_.packed_stride(part), extent.length);
}

bool View::release_if_untouched(const Held& held) {
  PinState expected = PinState::owed;
  if (!page().pins[held.pin].state.compare_exchange_strong(expected, PinState::free)) return false;
  taken_ &= ~(pin_bit(held.pin));
  return true;
}

bool View::populate_some() {
  constexpr std::size_t piece = 16 * MiB;
  if (kind() != device::MemoryKind::host || populated_ >= state_.bytes.size()) return false;
  const std::size_t size = std::min(piece, state_.bytes.size() - populated_);
  // Older kernels don't know it; then the pages come one by one, as they are touched.
  (void)::madvise(state_.bytes.data() + populated_, size, MADV_POPULATE_WRITE);
  populated_ += size;
  return true;
}

bool View::release(const Held& held) {
  PinState expected = PinState::owed;
  taken_ &= ~(pin_bit(held.pin));
  if (page().pins[held.pin].state.compare_exchange_strong(expected, PinState::free)) return true;
  if (expected == PinState::copying) withdrawing_ |= pin_bit(held.pin);
  else page().pins[held.pin].state.store(PinState::free);
  return false;
}

void View::read(BytesView from, std::byte* to) { check(access_->read(from, to)); }
void View::write(std::byte* to, BytesView from) { check(access_->write(to, from)); }

std::uint64_t View::digest(BytesView of) {
  return told(access_->digests({&of, 1}).map([](const auto& digests) { return digests.front(); }));
}

std::uint64_t View::digest(const Part& part) { return told(digest_of(manifest_, part, state_.bytes, *access_)); }

std::uint64_t View::digest(std::span<const BytesView> columns) { return told(digest_of(columns, *access_)); }

std::optional<std::uint64_t> digest_held(View& view, const View::Held& held) {
  const Part& part = view.manifest().parts()[held.part];
  if (view.where(held) == View::Where::state) {
    const std::uint64_t result = view.digest(part);
    if (view.where(held) == View::Where::state) return result;  // nobody had begun to change it until after
  }
  if (view.where(held) != View::Where::aside) return std::nullopt;
  std::vector<BytesView> columns;
  for (std::uint32_t column = 0; column < view.manifest().columns(part); ++column)
    columns.push_back(view.column(held, column, true));
  return view.digest(columns);
}

}  // namespace rejoin::shm
