// A daemon that takes the call of a trainer and says nothing: it is stopped, or one of its threads stands still.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "base/unix_socket.h"
#include "local.pb.h"
#include "local/offer.h"
#include "rejoin/log.h"
#include "rejoin/session.h"

namespace rejoin {
namespace {

struct SilentDaemon : testing::Test {
  std::string socket = "@silent_daemon_test." + std::to_string(::getpid());
  Fd listener = *listen_unix(socket);
  std::string lines;

  SilentDaemon() {
    set_log([this](LogLevel, std::string_view line) { lines.append(line).append("\n"); });
  }
  ~SilentDaemon() override { set_log({}); }
  // Why it could not join.
  std::string join(std::chrono::milliseconds patience, std::function<void()> while_waiting = {}) {
    SessionConfig config;
    config.socket = socket;
    config.patience = patience;
    config.while_waiting = std::move(while_waiting);
    auto session = *Session::open(config);
    const auto weights = session->add({.name = "w", .count = 16});
    EXPECT_TRUE(weights && session->bucket({*weights}) && session->allocate());
    const auto joined = session->join();
    EXPECT_FALSE(joined);
    return joined ? "" : joined.error().message;
  }
};

TEST_F(SilentDaemon, IsToldOfBeforePatienceIsOverAndTheErrorSaysForHowLongAndWhatToDo) {
  const auto why = join(std::chrono::milliseconds(300));
  EXPECT_EQ(why.find("the daemon at " + socket + " does not answer, for "), 0u) << why;
  EXPECT_NE(
      why.find(
          " s now (--patience-ms): it is stopped, hangs, or has too much to do. Let it go on (SIGCONT), or end it"),
      std::string::npos)
      << why;
  EXPECT_NE(lines.find("has taken the call and does not answer"), std::string::npos) << lines;
  EXPECT_EQ(lines.find("end it"), std::string::npos) << "it may be at work: " << lines;
  EXPECT_NE(lines.find("It is waited for (--patience-ms 300)"), std::string::npos) << lines;
}

// What it waits for itself.
TEST_F(SilentDaemon, OneThatSaysWhatItWaitsForIsHeard) {
  Fd trainer;
  const auto why = join(std::chrono::seconds(1), [&] {
    if (trainer) return;
    trainer = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    proto::ToTrainer message;
    message.set_waits("its thread stands");
    EXPECT_TRUE(send_with_fds(trainer, as_bytes(message.SerializeAsString()), {}));
  });
  EXPECT_NE(why.find("(--patience-ms): its thread stands"), std::string::npos) << why;
  EXPECT_NE(lines.find("makes this rank wait: its thread stands"), std::string::npos) << lines;
}

}  // namespace
}  // namespace rejoin
