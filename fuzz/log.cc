#include "membership/log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "membership/coordinator.h"

namespace {

struct Directory {
  std::string path;
  Directory() {
    char name[] = "/tmp/rejoin-fuzz-XXXXXX";
    if (::mkdtemp(name) == nullptr) std::abort();
    path = name;
  }
  ~Directory() {
    ::unlink((path + "/decisions.log").c_str());
    ::rmdir(path.c_str());
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  using namespace rejoin::membership;
  static const Directory directory;
  const std::string path = directory.path + "/decisions.log";
  {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) std::abort();
    (void)std::fwrite(data, 1, size, file);
    std::fclose(file);
  }
  if (auto records = read_log(path)) (void)audit(trained_by_step(*records));
  auto log = Log::open(directory.path);
  if (!log) return 0;
  Coordinator coordinator({.replicas = 2, .ranks = 2, .batch = 3});
  const TimePoint now{std::chrono::seconds(10)};
  if (!coordinator.recover(log->records(), now)) return 0;
  // What was accepted goes on, and its tail was cut for good.
  auto actions = coordinator.on_tick(now + std::chrono::hours(1));
  if (!log->append(actions.append)) std::abort();
  const auto count = log->records().size() + actions.append.size();
  log = fail(ErrorCode::unavailable, "closed");
  auto again = read_log(path);
  if (!again || again->size() != count) std::abort();
  return 0;
}
