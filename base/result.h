// Errors as values. What can happen at run time is a Result; what cannot is a REJOIN_CHECK (base/fail.h).
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>

#if __cplusplus <= 201703L
#error "Rejoin's headers are C++20: compile with -std=c++20 or later. rejoin/c.h is C, and any C++"
#endif
#if defined(_LIBCPP_VERSION) || (defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI)
#error \
    "librejoin has libstdc++'s std::string of C++11: use rejoin/c.h, or no -stdlib=libc++, -D_GLIBCXX_USE_CXX11_ABI=0"
#endif
#ifdef _GLIBCXX_DEBUG
#error \
    "librejoin is compiled without _GLIBCXX_DEBUG, which changes the layout of containers: _GLIBCXX_ASSERTIONS does not"
#endif

#pragma GCC visibility push(default)
namespace rejoin {

enum class ErrorCode {
  invalid_argument,  // the caller or the user gave something unusable
  not_found,         // what was named does not exist
  mismatch,          // two parties disagree (version, plan, key, manifest)
  refused,           // the other side declined (authentication, bad remote key, fenced)
  unavailable,       // the peer, daemon or device is not there, or no longer
  timeout,           // a deadline passed
  cancelled,         // ended by a newer epoch or by shutdown
  exhausted,         // a bound was reached: memory, disk, descriptors
  io,                // the operating system's error
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

}  // namespace rejoin

#pragma GCC visibility pop
