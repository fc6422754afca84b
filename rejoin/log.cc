#include "rejoin/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "base/log.h"
#include "rejoin/prepare_process.h"

namespace rejoin {

namespace {

// One that stays, so that no thread ever logs to a logger that is being replaced.
class Redirect final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  void set(LogSink other) {
    const std::lock_guard lock(one_at_a_time_);
    sink_ = std::move(other);
    to_program_ = static_cast<bool>(sink_);
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!to_program_) return stderr_->log(message);  // without a lock: a thread may have had it that no child has
    {
      const std::lock_guard lock(one_at_a_time_);
      if (sink_) return sink_(level_of(message.level), {message.payload.data(), message.payload.size()});
    }
    stderr_->log(message);  // the program has just taken its sink back
  }
  void flush_() override {}
  static LogLevel level_of(spdlog::level::level_enum level) {
    return level >= spdlog::level::err ? LogLevel::error : static_cast<LogLevel>(level);
  }
  std::mutex one_at_a_time_;
  LogSink sink_;
  std::atomic<bool> to_program_ = false;
  const std::shared_ptr<spdlog::sinks::sink> stderr_ = standard_error();  // a trainer does not stand still for it
};

const std::shared_ptr<Redirect>& redirect() {
  static const auto& sink = *new auto([] {
    auto made = std::make_shared<Redirect>();
    auto its = std::make_shared<spdlog::logger>("rejoin", made);
    if (const auto* programs = spdlog::default_logger_raw()) its->set_level(programs->level());
    set_logger(std::move(its));
    return made;
  }());
  return sink;
}

static_assert(static_cast<int>(LogLevel::warn) == spdlog::level::warn &&
              static_cast<int>(LogLevel::error) == spdlog::level::err);

}  // namespace

void log_to_stderr_by_default() {
  [[maybe_unused]] static const bool once = [] {
    const auto programs = spdlog::default_logger();
    if (programs && !programs->name().empty()) set_logger(programs);
    else (void)redirect();
    return true;
  }();
}

void set_log(LogSink sink) {
  log_to_stderr_by_default();  // which is settled with that
  redirect()->set(std::move(sink));
}

void set_log_level(LogLevel level) {
  log_to_stderr_by_default();
  logger().set_level(level == LogLevel::off ? spdlog::level::off : static_cast<spdlog::level::level_enum>(level));
}

}  // namespace rejoin
