#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace rejoin {

void init_logging(const std::string& who, const std::string& level) {
  auto logger = spdlog::stderr_color_mt(who);
  logger->set_pattern("%H:%M:%S.%e %-5l [%n] %v");
  logger->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace rejoin
