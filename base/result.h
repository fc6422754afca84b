// Errors as values. What can happen at run time is a Result; what cannot is a REJOIN_CHECK.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace rejoin {

enum class ErrorCode {
  invalid_argument,  // the caller or the user gave something unusable
  not_found,         // what was named does not exist
  mismatch,          // two parties disagree (version, plan, key, manifest)
  refused,           // the other side said no (authentication, bad remote key, fenced)
  unavailable,       // the peer, daemon or device is not there, or no longer
  timeout,           // a deadline passed
  cancelled,         // ended by a newer epoch or by shutdown
  exhausted,         // a bound was reached: memory, disk, descriptors
  io,                // the operating system said no
  unreachable,       // a device can't get at this memory; another may
  corrupt,           // bytes that cannot be what they claim to be
};

std::string_view to_string(ErrorCode code);

// A message names the thing, the value, the limit and the remedy.
struct Error {
  ErrorCode code = ErrorCode::io;
  std::string message;
};

template <typename T = void>
using Result = tl::expected<T, Error>;

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

// Always on: a false condition is a bug of ours, and going on would spread it.
#define REJOIN_CHECK(condition, ...) \
  (static_cast<bool>(condition)      \
       ? void(0)                     \
       : ::rejoin::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)))
