#include "rejoin/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>

#include "base/log.h"
#include "rejoin/log_default.h"

namespace rejoin {

namespace {

// One that stays, so that no thread ever logs to a logger that is being replaced.
class Redirect final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void set(LogSink other) {
    const std::lock_guard lock(mutex_);
    sink_ = std::move(other);
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!sink_) return stderr_->log(message);
    sink_(level_of(message.level), {message.payload.data(), message.payload.size()});
  }
  void flush_() override {}
  static LogLevel level_of(spdlog::level::level_enum level) {
    return level >= spdlog::level::err ? LogLevel::error : static_cast<LogLevel>(level);
  }
  LogSink sink_;
  const std::shared_ptr<spdlog::sinks::sink> stderr_ = standard_error();  // a trainer does not stand still for it
};

const std::shared_ptr<Redirect>& redirect() {
  static const auto& sink = *new auto([] {
    auto made = std::make_shared<Redirect>();
    auto logger = std::make_shared<spdlog::logger>("rejoin", made);
    logger->set_level(spdlog::default_logger_raw()->level());
    // For as long as the process: while it ends, threads of sessions that live may still have something to say.
    static const auto& kept = *new std::shared_ptr<spdlog::logger>(std::move(logger));
    spdlog::set_default_logger(kept);
    return made;
  }());
  return sink;
}

static_assert(static_cast<int>(LogLevel::warn) == spdlog::level::warn &&
              static_cast<int>(LogLevel::error) == spdlog::level::err);

}  // namespace

void log_to_stderr_by_default() {
  if (spdlog::default_logger_raw()->name().empty()) (void)redirect();
}

void set_log(LogSink sink) { redirect()->set(std::move(sink)); }

void set_log_level(LogLevel level) {
  spdlog::default_logger_raw()->set_level(level == LogLevel::off ? spdlog::level::off
                                                                 : static_cast<spdlog::level::level_enum>(level));
}

}  // namespace rejoin
