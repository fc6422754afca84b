#include <cstring>

#include "fuzz/input.h"
#include "local/owner.h"
#include "local/view.h"

using namespace rejoin;

// A trainer that scribbles anything over its page, between any two looks of the daemon.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static local::Owner owner =
      local::Owner::make(local::Manifest::make({{.name = "a", .count = 100, .columns = 2},
                                                {.name = "b", .count = 7, .elementwise = false}})
                             .value())
          .value();
  static const Bytes fresh(reinterpret_cast<const std::byte*>(&owner.page()),
                           reinterpret_cast<const std::byte*>(&owner.page()) + sizeof(local::Page));
  std::memcpy(static_cast<void*>(&owner.page()), fresh.data(), fresh.size());
  fuzz::Input input{data, size};
  const auto scribble = [&] { input.scribble(&owner.page(), sizeof(local::Page) + 64); };
  const bool before = input.next() % 2 == 0;
  if (before) scribble();
  auto view = local::View::of(owner);
  if (!view) return 0;
  std::vector<local::View::Pinned> pinned;
  while (input.size > 0) {
    scribble();
    switch (input.next() % 8) {
      case 0:
        if (auto some = view->pin({input.next() % 2u}))
          pinned.insert(pinned.end(), some->second.begin(), some->second.end());
        break;
      case 1:
        for (const auto& one : pinned) (void)view->where(one);
        break;
      case 2:
        if (!pinned.empty()) (void)view->release(pinned.back()), pinned.pop_back();
        break;
      case 3:
        if (!pinned.empty() && view->release_if_untouched(pinned.back())) pinned.pop_back();
        break;
      case 4: (void)local::pinned_digests(*view, pinned); break;
      case 5:
        (void)view->set_slice(input.next() % 2, view->slice(0), {local::SliceState::requested, input.next()});
        break;
      case 6: (void)view->clock(), (void)view->phase(), (void)view->free_pins(), (void)view->slice(1); break;
      default: (void)view->populate_some();
    }
  }
  return 0;
}
