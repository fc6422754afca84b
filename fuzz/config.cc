#include "daemon/config.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "base/command_line.h"
#include "catchup/coder.h"
#include "daemon/listen.h"
#include "transport/ibverbs/factory.h"

// A settings file, and the settings that have a form of their own.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  const std::string text(reinterpret_cast<const char*>(data), size);
  daemon::Config config;
  CommandLine line("");
  daemon::bind(line, config);
  static const int file = ::memfd_create("settings", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  (void)line.parse(std::vector<std::string>{"--config", path});
  (void)transport::ibverbs::parse_options(text);
  (void)catchup::parse_compression(text);
  (void)daemon::endpoint_of(text);
  return 0;
}
