// Preloaded, a disk that stands still while the file $SLOW_FILE is there: a write() to the regular file that is
// the process's standard error waits until that is gone.
#include <dlfcn.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

namespace {

bool leads_to_log(int descriptor) {
  struct stat log {
  }, it{};
  return ::fstat(STDERR_FILENO, &log) == 0 && S_ISREG(log.st_mode) && ::fstat(descriptor, &it) == 0 &&
         it.st_dev == log.st_dev && it.st_ino == log.st_ino;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ssize_t write(int descriptor, const void* bytes, size_t size) {
  using Write = ssize_t (*)(int, const void*, size_t);
  static const auto next = reinterpret_cast<Write>(::dlsym(RTLD_NEXT, "write"));
  const char* stands_still = ::getenv("SLOW_FILE");
  if (stands_still != nullptr && leads_to_log(descriptor))
    while (::access(stands_still, F_OK) == 0) {
      const timespec briefly{0, 5'000'000};
      ::nanosleep(&briefly, nullptr);
    }
  return next(descriptor, bytes, size);
}
