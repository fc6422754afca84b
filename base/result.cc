#include "base/result.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace rejoin {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid argument";
    case ErrorCode::not_found: return "not found";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::refused: return "refused";
    case ErrorCode::unavailable: return "unavailable";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::cancelled: return "cancelled";
    case ErrorCode::exhausted: return "exhausted";
    case ErrorCode::io: return "i/o error";
    case ErrorCode::unreachable: return "unreachable";
    case ErrorCode::corrupt: return "corrupt";
  }
  return "unknown";
}

tl::unexpected<Error> fail_errno(std::string_view what) {
  const int saved = errno;
  const ErrorCode code = (saved == ENOSPC || saved == ENOMEM || saved == EMFILE || saved == ENFILE || saved == EDQUOT)
                             ? ErrorCode::exhausted
                             : ErrorCode::io;
  return tl::unexpected(Error{code, fmt::format("{}: {}", what, std::strerror(saved))});
}

void check_failed(const char* file, int line, const char* expression, std::string_view message) {
  std::fprintf(stderr, "%s:%d: check failed: %s%s%.*s\n", file, line, expression, message.empty() ? "" : ": ",
               static_cast<int>(message.size()), message.data());
  std::fflush(stderr);
  std::abort();
}

}  // namespace rejoin
