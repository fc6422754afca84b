#include "base/fail.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/log_file.h"

namespace rejoin {

tl::unexpected<Error> fail_errno(std::string_view what) {
  const int saved = errno;
  const ErrorCode code = (saved == ENOSPC || saved == ENOMEM || saved == EMFILE || saved == ENFILE || saved == EDQUOT)
                             ? ErrorCode::exhausted
                             : ErrorCode::io;
  return tl::unexpected(Error{code, fmt::format("{}: {}{}", what, std::strerror(saved),
                                                saved == EMFILE ? "; raise the limit with 'ulimit -n'" : "")});
}

void check_failed(const char* file, int line, const char* expression, std::string_view message) {
  wait_for_log();
  std::fprintf(stderr, "%s:%d: check failed: %s%s%.*s\n", file, line, expression, message.empty() ? "" : ": ",
               static_cast<int>(message.size()), message.data());
  std::fflush(stderr);
  std::abort();
}

}  // namespace rejoin
