// Peers that are known by names, while a name server takes its time.
#include "transport/names.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <poll.h>

#include <string_view>

#include "transport/tcp/factory.h"
#include "transport/tests/name_server.h"
#include "transport/tests/within.h"

namespace rejoin::transport {

NameServer& name_server() {
  static NameServer server;
  return server;
}

namespace {

struct SlowNames : testing::Test {
  std::unique_ptr<Engine> server = tcp::make_engine({}).value(), client = tcp::make_engine({}).value();
  const std::string address = server->listen({"127.0.0.1:0"})->text;
  const std::string slow = "slow.test" + address.substr(address.rfind(':'));
  std::vector<EndpointId> connected;
  std::optional<Error> lost;

  SlowNames() { name_server().set(false); }
  ~SlowNames() override { name_server().finish(); }
  void poll() {
    for (const auto& event : client->poll()) {
      if (event.kind == EventKind::connected) connected.push_back(event.endpoint);
      if (event.kind == EventKind::closed) lost = event.error;
    }
    (void)server->poll();
  }
  template <typename Condition>
  bool comes_true(Condition condition) {
    return within(std::chrono::seconds(20), [&] { return poll(), condition(); });
  }
  bool asks() {
    return comes_true([] { return name_server().asked_now() > 0; });
  }
};

TEST_F(SlowNames, KeepNobodyFromConnectingWithOthers) {
  const auto late = *client->connect({slow}, {});
  ASSERT_TRUE(asks());
  const auto other = *client->connect({address}, {});
  EXPECT_TRUE(comes_true([&] { return !connected.empty(); }));
  EXPECT_EQ(connected, std::vector{other});
  name_server().set(true);
  EXPECT_TRUE(comes_true([&] { return connected.size() == 2; }));
  EXPECT_EQ(connected.back(), late);
  EXPECT_FALSE(lost) << lost->message;
}

TEST_F(SlowNames, MeanWhatTheyHaveMeantBefore) {
  name_server().set(true);
  client->set_silence(std::chrono::milliseconds(400));
  client->close(*client->connect({slow}, {}));  // it is looked up nevertheless
  const auto first = *client->connect({slow}, {});
  ASSERT_TRUE(comes_true([&] { return connected == std::vector{first}; }));
  name_server().set(false);
  const auto again = *client->connect({slow}, {});
  ASSERT_TRUE(asks());
  EXPECT_TRUE(comes_true([&] { return connected.size() == 2; })) << (lost ? lost->message : "");
  EXPECT_EQ(connected.back(), again);
  EXPECT_EQ(name_server().asked_now(), 1);
}

TEST_F(SlowNames, AreLostAsWhoDoesNotAnswer) {
  client->set_silence(std::chrono::milliseconds(100));
  ASSERT_TRUE(client->connect({slow}, {}));
  EXPECT_TRUE(comes_true([&] { return lost.has_value(); }));
  EXPECT_EQ(lost->code, ErrorCode::unavailable);
  EXPECT_NE(lost->message.find("its name is not resolved in 0.5 s"), std::string::npos) << lost->message;
}

TEST_F(SlowNames, WakeNobodyWhoHasGivenThemUp) {
  client->close(*client->connect({slow}, {}));
  ASSERT_TRUE(asks());
  name_server().finish();
  pollfd wakes{client->event_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&wakes, 1, 20'000), 1);
  poll();
  EXPECT_EQ(::poll(&wakes, 1, 0), 0) << "it would wake its thread for ever";
  EXPECT_TRUE(connected.empty());
}

TEST_F(SlowNames, ThatNobodyHasAreAnErrorOfTheirConnection) {
  ASSERT_TRUE(client->connect({"no.such.name.test:1"}, {}));
  EXPECT_TRUE(comes_true([&] { return lost.has_value(); }));
  EXPECT_NE(lost->message.find("no.such.name.test:1"), std::string::npos) << lost->message;
}

}  // namespace
}  // namespace rejoin::transport

extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  using Own = int(const char*, const char*, const addrinfo*, addrinfo**);
  static auto* own = reinterpret_cast<Own*>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string_view host = name == nullptr ? "" : name;
  const bool number = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (number || !host.ends_with(".test")) return own(name, service, hints, found);
  if (host == "slow.test") {
    auto& server = rejoin::transport::name_server();
    std::unique_lock lock(server.mutex);
    ++server.waiting;
    server.changed.wait(lock, [&] { return server.answers; });
    --server.waiting;
    server.changed.notify_all();
    return own("127.0.0.1", service, hints, found);
  }
  if (host != "two.addresses.test") return EAI_NONAME;
  if (const int error = own("127.0.0.9", service, hints, found); error != 0) return error;
  return own("127.0.0.1", service, hints, &(*found)->ai_next);
}
