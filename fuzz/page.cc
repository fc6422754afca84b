#include <cstring>

#include "fuzz/input.h"
#include "shm/owner.h"
#include "shm/view.h"

using namespace rejoin;

// A trainer that scribbles anything over its page, between any two looks of the daemon.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static shm::Owner owner = shm::Owner::make(shm::Manifest::make({{.name = "a", .count = 100, .columns = 2},
                                                                  {.name = "b", .count = 7, .elementwise = false}})
                                                 .value())
                                .value();
  static const Bytes fresh(reinterpret_cast<const std::byte*>(&owner.page()),
                           reinterpret_cast<const std::byte*>(&owner.page()) + sizeof(shm::Page));
  std::memcpy(static_cast<void*>(&owner.page()), fresh.data(), fresh.size());
  fuzz::Input input{data, size};
  const auto scribble = [&] { input.scribble(&owner.page(), sizeof(shm::Page) + 64); };
  const bool before = input.next() % 2 == 0;
  if (before) scribble();
  auto view = shm::View::of(owner);
  if (!view) return 0;
  std::vector<shm::View::Held> held;
  while (input.size > 0) {
    scribble();
    switch (input.next() % 8) {
      case 0:
        if (auto some = view->hold({input.next() % 2u}))
          held.insert(held.end(), some->second.begin(), some->second.end());
        break;
      case 1:
        for (const auto& one : held) (void)view->where(one);
        break;
      case 2:
        if (!held.empty()) (void)view->release(held.back()), held.pop_back();
        break;
      case 3:
        if (!held.empty() && view->release_if_untouched(held.back())) held.pop_back();
        break;
      case 4: (void)shm::digests_held(*view, held); break;
      case 5:
        (void)view->set_slice(input.next() % 2, view->slice(0), {shm::SliceState::requested, input.next()});
        break;
      case 6: (void)view->clock(), (void)view->phase(), (void)view->free_pins(), (void)view->slice(1); break;
      default: (void)view->populate_some();
    }
  }
  return 0;
}
