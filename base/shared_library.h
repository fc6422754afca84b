// A vendor's library that is looked for when something needs it, so that one build runs with and without it.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "base/fail.h"

namespace rejoin {

// Loaded for good: what it has started, and what others have of it, stays to the program's end.
class SharedLibrary {
 public:
  // `packages`: what brings it, as "Debian: libfoo1". Errors: `unavailable` where the loader does not find or take it.
  static Result<SharedLibrary> load(const std::string& name, const std::string& packages);

  template <typename Function>
  void find(Function*& function, const char* symbol) {
    function = reinterpret_cast<Function*>(address_of(symbol));
  }
  // After all of them: `unavailable` names those that were not there.
  Result<> complete() const;

 private:
  SharedLibrary(void* opened, std::string name) : opened_(opened), name_(std::move(name)) {}
  void* address_of(const char* symbol);

  void* opened_;
  std::string name_, missing_;
};

// A value of a static lifetime that is never destroyed, since others of such a lifetime may use it to their own end. It
// lies in place: a plugin that is unloaded leaves nothing of it behind.
template <typename T>
class NeverDestroyed {
 public:
  explicit NeverDestroyed(T value) { new (storage_) T(std::move(value)); }
  NeverDestroyed(const NeverDestroyed&) = delete;
  const T& operator*() const { return *std::launder(reinterpret_cast<const T*>(storage_)); }

 private:
  alignas(T) std::byte storage_[sizeof(T)];
};

// A table of libraries' functions, as kLoad fills it when it is first asked for. Stays.
template <typename Table, Result<Table> (*kLoad)()>
const Result<Table>& loaded_once() {
  static const NeverDestroyed<Result<Table>> table(kLoad());
  return *table;
}
// The same for who has to go on without.
template <typename Table, Result<Table> (*kLoad)()>
Result<const Table*> try_load() {
  const auto& loaded = loaded_once<Table, kLoad>();
  if (!loaded) return tl::unexpected(loaded.error());
  return &*loaded;
}
// The same for who comes after that.
template <typename Table, Result<Table> (*kLoad)()>
const Table& has_loaded() {
  const auto& loaded = loaded_once<Table, kLoad>();
  REJOIN_CHECK(loaded, "{}", loaded.error().message);
  return *loaded;
}

}  // namespace rejoin
