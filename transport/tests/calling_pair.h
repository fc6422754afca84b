// Two engines, of which one calls the other, as far as tests of their start look at them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/log.h"
#include "transport/transport.h"

namespace rejoin::transport {

struct CallingPair {
  std::unique_ptr<Engine> a, b;  // a calls
  EndpointId of_a, of_b;
  bool up_a = false, up_b = false;
  std::uint64_t completed = 0;  // of a
  std::optional<Error> end;     // as a hears it

  [[nodiscard]] bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done() && std::chrono::steady_clock::now() < deadline) {
      for (const auto& event : a->poll()) {
        up_a |= event.kind == EventKind::connected;
        if (event.kind == EventKind::closed) end = event.error;
        completed += event.kind == EventKind::completed && !event.error;
      }
      for (const auto& event : b->poll())
        if (event.kind == EventKind::accepted) of_b = event.endpoint, up_b = true;
    }
    return done();
  }
};

inline std::string logged_by(const std::function<void()>& what) {
  spdlog::set_level(spdlog::level::info);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  what();
  return testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
}

}  // namespace rejoin::transport
