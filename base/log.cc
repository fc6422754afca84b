#include "base/log.h"

#include <poll.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <iterator>
#include <memory>
#include <mutex>

namespace rejoin {

namespace {

// Standard error, which nobody may read: a terminal that was stopped, a full pipe. A daemon does not stand still for
// that. What is not taken is left out, and counted.
class StandardError : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    if (left_out_ > 0)
      fmt::format_to(std::back_inserter(line), "... {} lines were left out, since nobody read them\n", left_out_);
    formatter_->format(message, line);
    left_out_ = put({line.data(), line.size()}) ? 0 : left_out_ + 1;
  }
  void flush_() override {}

 private:
  // Of a pipe that says that it may be written to, this much fits.
  bool put(std::string_view text) const {
    while (!text.empty()) {
      pollfd may{STDERR_FILENO, POLLOUT, 0};
      const int patience = left_out_ > 0 ? 0 : 10;  // ms: whoever reads may be about to
      if (::poll(&may, 1, patience) <= 0) return false;
      const ssize_t wrote = ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
      if (wrote <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(wrote));
    }
    return true;
  }

  std::size_t left_out_ = 0;
};

}  // namespace

void init_logging(const std::string& who, const std::string& level) {
  auto logger = std::make_shared<spdlog::logger>(who, std::make_shared<StandardError>());
  logger->set_pattern("%H:%M:%S.%e %-5l [%n] %v");
  logger->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace rejoin
