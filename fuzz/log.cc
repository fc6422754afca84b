#include "membership/log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/fail.h"
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

// Without the room behind what is written.
rejoin::Bytes contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto all = rejoin::as_bytes(text);
  const auto parsed = rejoin::membership::parse_log(all, path);
  if (!parsed) std::abort();
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(parsed->end())};
}

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
  // A flipped bit is an error, or loses nothing.
  Bytes bytes = contents(path);
  std::uint64_t chosen = size;
  for (std::size_t i = 0; i < std::min<std::size_t>(size, 64); ++i) chosen = chosen * 31 + data[i];
  bytes[chosen / 8 % bytes.size()] ^= std::byte{1} << static_cast<int>(chosen % 8);
  if (auto damaged = parse_log(bytes, path); damaged && damaged->records.size() != count) std::abort();
  return 0;
}
