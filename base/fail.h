// How errors are made, and texts with errors and ids in them: what of base/result.h and base/ids.h needs fmt. No public
// header includes it, so that who uses the library needs no fmt.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "base/ids.h"
#include "base/result.h"

namespace rejoin {

template <typename... Args>
[[nodiscard]] tl::unexpected<Error> fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}

// "WHAT: strerror(errno)", for system calls; call it before anything else touches errno.
[[nodiscard]] tl::unexpected<Error> fail_errno(std::string_view what);

[[noreturn]] void check_failed(const char* file, int line, const char* expression, std::string_view message);

}  // namespace rejoin

template <>
struct fmt::formatter<rejoin::Error> : fmt::formatter<std::string_view> {
  auto format(const rejoin::Error& error, fmt::format_context& context) const {
    return fmt::format_to(context.out(), "{} ({})", error.message, rejoin::to_string(error.code));
  }
};

template <typename Tag, typename T>
struct fmt::formatter<rejoin::Id<Tag, T>> : fmt::formatter<T> {
  auto format(const rejoin::Id<Tag, T>& id, fmt::format_context& context) const {
    return fmt::formatter<T>::format(id.value, context);
  }
};

// Always on: a false condition is a bug of ours, and going on would spread it.
#define REJOIN_CHECK(condition, ...) \
  (static_cast<bool>(condition)      \
       ? void(0)                     \
       : ::rejoin::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)))
