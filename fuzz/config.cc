#include "daemon/config.h"

#include <CLI/CLI.hpp>
#include <sstream>

#include "catchup/coder.h"
#include "daemon/listen.h"
#include "transport/ibverbs/factory.h"

// A settings file, and the settings that have a form of their own.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  const std::string text(reinterpret_cast<const char*>(data), size);
  daemon::Config config;
  CLI::App app;
  daemon::bind(app, config);
  std::istringstream file(text);
  try {
    app.parse_from_stream(file);
  } catch (const CLI::Error&) {
  }
  (void)transport::ibverbs::parse_options(text);
  (void)catchup::parse_compression(text);
  (void)daemon::endpoint_of(text);
  return 0;
}
