// A vendor's library that is looked for when something needs it, so that one build runs with and without it.
#pragma once

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

// What a load gave, in place: it owns no memory and needs no destructor, since others of a static lifetime may use it
// to their own end, and a plugin that is unloaded is to leave nothing of it behind.
template <typename Table>
class Loaded {
 public:
  static_assert(std::is_trivially_destructible_v<Table>);

  explicit Loaded(const Result<Table>& result) : there_(result) {
    if (result) {
      table_ = *result;
    } else {
      code_ = result.error().code;
      result.error().message.copy(why_, sizeof why_ - 1);
    }
  }
  // Errors: as the load gave it, cut to some hundred characters.
  Result<const Table*> get() const {
    if (!there_) return tl::unexpected(Error{code_, why_});
    return &table_;
  }

 private:
  Table table_{};
  bool there_;
  ErrorCode code_{};
  char why_[512] = {};
};

// A table of libraries' functions, as kLoad fills it when it is first asked for.
template <typename Table, Result<Table> (*kLoad)()>
Result<const Table*> load_once() {
  static const Loaded<Table> loaded(kLoad());
  static_assert(std::is_trivially_destructible_v<decltype(loaded)>);
  return loaded.get();
}
// The same for who comes after that.
template <typename Table, Result<Table> (*kLoad)()>
const Table& has_loaded() {
  static const Table* table = [] {
    const auto loaded = load_once<Table, kLoad>();
    REJOIN_CHECK(loaded, "{}", loaded.error().message);
    return *loaded;
  }();
  return *table;
}

}  // namespace rejoin
