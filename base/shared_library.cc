#include "base/shared_library.h"

#include <dlfcn.h>

#include "base/fail.h"

namespace rejoin {

Result<SharedLibrary> SharedLibrary::load(const std::string& name, const std::string& packages) {
  void* opened = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened != nullptr) return SharedLibrary(opened, name);
  const char* why = ::dlerror();
  return fail(ErrorCode::unavailable, "{} is not there: install it ({}). The loader says: {}", name, packages,
              why != nullptr ? why : "nothing");
}

void* SharedLibrary::address_of(const char* symbol) {
  void* address = ::dlsym(opened_, symbol);
  if (address == nullptr) missing_ += (missing_.empty() ? "" : ", ") + std::string(symbol);
  return address;
}

Result<> SharedLibrary::complete() const {
  if (missing_.empty()) return {};
  return fail(ErrorCode::unavailable, "{} is too old: it lacks {}; install a newer one", name_, missing_);
}

}  // namespace rejoin
