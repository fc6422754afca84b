// Sessions in this process, at the daemons of a job.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "base/fail.h"
#include "rejoin/session.h"
#include "tests/daemons.h"
#include "tests/session_config.h"

namespace rejoin::test {

using namespace std::chrono_literals;

// However long a crowded machine takes: what happens at once does not wait for it.
inline constexpr auto kSilence = 10s;
inline constexpr std::uint64_t kMuch = 3'000'000;  // elements: many slices, which arrive over several steps

struct Trained : testing::Test, Daemons {
  std::vector<std::unique_ptr<Process>> processes;
  TensorId w, b;

  void start(std::uint32_t replicas, std::uint32_t ranks = 1, std::uint64_t steps = 0,
             std::chrono::milliseconds silence = kSilence) {
    silence_ms = std::to_string(silence.count());
    processes.push_back(start_coordinator({"--replicas", std::to_string(replicas), "--ranks", std::to_string(ranks),
                                           "--batch", "8", "--steps", std::to_string(steps)}));
    for (std::uint32_t r = 0; r < replicas; ++r) processes.push_back(start_node(r, {"--connect", coordinator}));
  }
  SessionConfig config(std::uint32_t replica, std::uint32_t rank = 0) const { return config_of(*this, replica, rank); }
  // Two tensors in a bucket each; it has not joined.
  std::unique_ptr<Session> declared(const SessionConfig& config, std::uint64_t count = 1000) {
    auto session = Session::open(config);
    if (!session) return ADD_FAILURE() << session.error().message, nullptr;
    w = (*session)->add({.name = "w", .count = count, .moments = 2}).value();
    b = (*session)->add({.name = "b", .count = 10}).value();
    EXPECT_TRUE((*session)->bucket({w}));
    EXPECT_TRUE((*session)->bucket({b}));
    EXPECT_TRUE((*session)->allocate());
    return std::move(*session);
  }
  std::unique_ptr<Session> joined(std::uint32_t replica, std::uint64_t count = 1000) {
    auto session = declared(config(replica), count);
    if (!session) return nullptr;
    if (auto joined = session->join(); !joined) return ADD_FAILURE() << joined.error().message, nullptr;
    return session;
  }
  // Each element counts the steps.
  static Result<> commit(Session& session) {
    return session.commit([&](const Update& update) {
      for (auto& x : update.of(Session::as<float>(session.weight(update.tensor).value()))) x += 1;
    });
  }
  static Result<> step_once(Session& session) {
    auto step = session.begin_step();
    if (!step) return tl::unexpected(step.error());
    if (!*step) return fail(ErrorCode::not_found, "the job is finished");
    for (BucketId bucket = 0; (*step)->contributes() && bucket < 2; ++bucket)
      if (auto reduced = session.all_reduce(bucket); !reduced) return reduced;
    return commit(session);
  }
  // Runs steps of a session until something in it ends it. Outlived by the session, also where a test fails.
  class Training {
   public:
    Training(Session& session, std::atomic<std::uint64_t>* steps)
        : session_(session), end_(std::async(std::launch::async, [&session, steps] {
            for (;; steps != nullptr ? ++*steps : 0)
              if (auto done = step_once(session); !done) return done.error();
          })) {}
    Training(Training&&) = default;
    ~Training() {
      if (end_.valid()) session_.interrupt();
    }
    Error get() { return end_.get(); }
    bool ends_within(std::chrono::milliseconds limit) { return end_.wait_for(limit) == std::future_status::ready; }

   private:
    Session& session_;
    std::future<Error> end_;
  };
  static Training trains(Session& session, std::atomic<std::uint64_t>* steps = nullptr) {
    return Training(session, steps);
  }
  std::uint64_t committed() const {
    const auto now = status();
    return now.is_null() ? 0 : now.value("committed", std::uint64_t{0});
  }
  std::string log_of(const std::string& name) const { return read_file(file(name + ".out")); }
};

// Runs `what`; a duration that only an event can end, well within the silence.
template <typename What>
std::chrono::milliseconds timed(What what) {
  const auto before = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - before);
}

#define EXPECT_REFUSED(result, with, ...)                               \
  do {                                                                  \
    const auto refused = (result);                                      \
    ASSERT_FALSE(refused);                                              \
    EXPECT_EQ(refused.error().code, with) << refused.error().message;   \
    for (const char* part : {__VA_ARGS__})                              \
      EXPECT_NE(refused.error().message.find(part), std::string::npos)  \
          << "'" << part << "' is not in: " << refused.error().message; \
  } while (false)

}  // namespace rejoin::test
