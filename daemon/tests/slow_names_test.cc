// Names whose resolution takes its time: getaddrinfo() is this program's.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "daemon/node_listener.h"
#include "daemon/tests/meeting.h"
#include "daemon/upstream.h"

namespace rejoin::daemon {
namespace {

// A name server that does not answer for slow.example until it is told to.
struct NameServer {
  std::mutex mutex;
  std::condition_variable changed;
  bool answers = false;
  int asked = 0, waiting = 0, given_up = 0;

  void wait() {
    std::unique_lock lock(mutex);
    ++asked;
    ++waiting;
    if (!changed.wait_for(lock, std::chrono::seconds(20), [this] { return answers; })) ++given_up;
    --waiting;
    changed.notify_all();
  }
  template <typename Value>
  Value of(Value NameServer::*value) {
    const std::lock_guard lock(mutex);
    return this->*value;
  }
  void answer() {
    const std::lock_guard lock(mutex);
    answers = true;
    changed.notify_all();
  }
};
NameServer* name_server = nullptr;

// Nobody is left in it at the end.
struct SlowNames : testing::Test {
  NameServer server;
  SlowNames() { name_server = &server; }
  ~SlowNames() override {
    server.answer();
    std::unique_lock lock(server.mutex);
    server.changed.wait(lock, [this] { return server.waiting == 0; });
    name_server = nullptr;
  }
};

constexpr std::chrono::milliseconds kTry(500);

struct Asker {
  Asker(asio::io_context& io, const std::string& address)
      : upstream(io, address, keys, kTry,
                 {.up = [this] { ++ups; },
                  .message = [](const proto::ToNode&) {},
                  .down = [this] { ++downs; },
                  .over = [] { return false; },
                  .rejected = [] {}}) {
    upstream.connect();
  }
  int ups = 0, downs = 0;
  JobKeys keys{test::kKey};
  Upstream upstream;
};

bool comes_true(asio::io_context& io, const std::function<bool()>& condition) {
  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(15);
  while (!condition() && SteadyClock().now() < deadline) io.run_one_for(std::chrono::milliseconds(10));
  return condition();
}

struct Listening {
  explicit Listening(asio::io_context& io)
      : listener(io, keys, kTry, {.message = [](auto, const auto&) {}, .lost = [](auto) {}}) {
    const auto address = listener.listen("127.0.0.1:0");
    EXPECT_TRUE(address);
    port = listener.address().substr(listener.address().rfind(':'));
  }
  JobKeys keys{test::kKey};
  NodeListener listener;
  std::string port;
};

TEST_F(SlowNames, KeepNoOtherCoordinatorWaiting) {
  asio::io_context io{1};
  Listening coordinator(io);
  Asker first(io, "slow.example" + coordinator.port);
  ASSERT_TRUE(comes_true(io, [&] { return server.of(&NameServer::waiting) == 1; }));
  Asker second(io, "localhost" + coordinator.port);
  EXPECT_TRUE(comes_true(io, [&] { return second.ups == 1; })) << second.upstream.why_lost();
  EXPECT_EQ(first.ups, 0);
  server.answer();
}

TEST_F(SlowNames, AreWaitedForWhileOneTryAfterTheOtherEnds) {
  asio::io_context io{1};
  Listening coordinator(io);
  Asker caller(io, "slow.example" + coordinator.port);
  ASSERT_TRUE(comes_true(io, [&] { return caller.downs == 3; }));
  EXPECT_EQ(caller.upstream.why_lost(), "its name is not resolved in time");
  EXPECT_EQ(server.of(&NameServer::asked), 1);
  server.answer();
  EXPECT_TRUE(comes_true(io, [&] { return caller.ups == 1; })) << caller.upstream.why_lost();
}

// Two addresses: the first is that of a listener that has all the callers that it takes, and answers no more.
struct SilentAddress : testing::Test {
  asio::io_context io{1};
  Listening coordinator{io};
  asio::ip::tcp::endpoint silent{asio::ip::make_address("127.0.0.9"),
                                 static_cast<std::uint16_t>(std::stoi(coordinator.port.substr(1)))};
  asio::ip::tcp::acceptor full{io};
  std::vector<asio::ip::tcp::socket> callers;
  SilentAddress() {
    full.open(silent.protocol());
    full.bind(silent);
    full.listen(0);
    for (int i = 0; i < 4; ++i) callers.emplace_back(io).async_connect(silent, [](auto) {});
  }
};

TEST_F(SilentAddress, CostsNoTryAndComesLastFromThenOn) {
  Asker caller(io, "two.example" + coordinator.port);
  ASSERT_TRUE(comes_true(io, [&] { return caller.ups == 1 || caller.downs > 0; }));
  EXPECT_EQ(caller.downs, 0) << caller.upstream.why_lost();
  for (int lost = 1; lost < 4; ++lost) {
    caller.upstream.connect_anew("it was reset");
    ASSERT_TRUE(comes_true(io, [&] { return caller.ups == lost + 1 || caller.downs > lost; }));
    EXPECT_EQ(caller.downs, lost) << caller.upstream.why_lost();
  }
}

TEST_F(SlowNames, KeepNobodyFromEnding) {
  {
    asio::io_context io{1};
    Asker caller(io, "slow.example:7000");
    ASSERT_TRUE(comes_true(io, [&] { return server.of(&NameServer::waiting) == 1; }));
  }
  EXPECT_EQ(server.of(&NameServer::waiting), 1);
  EXPECT_EQ(server.of(&NameServer::given_up), 0);
}

}  // namespace
}  // namespace rejoin::daemon

extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  using Own = int(const char*, const char*, const addrinfo*, addrinfo**);
  static auto* own = reinterpret_cast<Own*>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (name != nullptr && std::strcmp(name, "slow.example") == 0) {
    rejoin::daemon::name_server->wait();
    name = "localhost";
  }
  if (name != nullptr && std::strcmp(name, "unknown.example") == 0) return EAI_NONAME;
  if (name != nullptr && std::strcmp(name, "moved.example") == 0) {  // behind the first question
    static std::atomic<int> asked = 0;
    name = asked++ == 0 ? "127.0.0.15" : "127.0.0.16";
  }
  if (name != nullptr && std::strcmp(name, "three.example") == 0) {  // in another order each time
    static std::atomic<int> asked = 0;
    const int first = asked++;
    for (int i = 0; i < 3; ++i, found = &(*found)->ai_next)
      if (const int error =
              own(std::array{"127.0.0.11", "127.0.0.12", "127.0.0.13"}.at((first + i) % 3), service, hints, found);
          error != 0)
        return error;
    return 0;
  }
  if (name == nullptr || std::strcmp(name, "two.example") != 0) return own(name, service, hints, found);
  if (const int error = own("127.0.0.9", service, hints, found); error != 0) return error;
  return own("127.0.0.1", service, hints, &(*found)->ai_next);
}
