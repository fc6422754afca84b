#include "daemon/config.h"

#include <sstream>

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
  std::istringstream file(text);
  (void)line.parse_settings(file);
  (void)transport::ibverbs::parse_options(text);
  (void)catchup::parse_compression(text);
  (void)daemon::endpoint_of(text);
  return 0;
}
