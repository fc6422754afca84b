// The TCP backend over a wire that flips bits.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/records.h"
#include "transport/tests/within.h"

namespace rejoin::transport::tcp {
namespace {

// Between a client and a server: passes on what either says, with one bit of the client's bytes the other way round.
class Wire {
 public:
  Wire(std::uint16_t server, std::size_t flipped_bit) : server_(server), flipped_bit_(flipped_bit) {
    listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_.get(), 1), 0);
    socklen_t size = sizeof address;
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  std::uint16_t port() const { return port_; }
  const std::string& seen() const { return seen_; }  // of what the client has said

  void pump() {
    if (!client_side_) {
      client_side_ = Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK));
      if (!client_side_) return;
      server_side_ = Fd(::socket(AF_INET, SOCK_STREAM, 0));
      sockaddr_in address{
          .sin_family = AF_INET, .sin_port = htons(server_), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
      ASSERT_EQ(::connect(server_side_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    }
    pass(client_side_, server_side_, true);
    pass(server_side_, client_side_, false);
  }

 private:
  void pass(Fd& from, Fd& to, bool flips) {
    std::byte bytes[4096];
    const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got == 0) ::shutdown(to.get(), SHUT_WR);
    if (got <= 0) return;
    const auto count = static_cast<std::size_t>(got);
    if (flips) {
      seen_ += as_text(BytesView(bytes, count));
      const std::size_t at = flipped_bit_ / 8;
      if (at >= passed_ && at < passed_ + count) bytes[at - passed_] ^= std::byte(1u << flipped_bit_ % 8);
      passed_ += count;
    }
    EXPECT_EQ(::send(to.get(), bytes, count, MSG_NOSIGNAL), got);
  }

  const std::uint16_t server_;
  const std::size_t flipped_bit_;
  std::uint16_t port_ = 0;
  std::size_t passed_ = 0;
  std::string seen_;
  Fd listener_, client_side_, server_side_;
};

// By the kernel where that can: everywhere else such an engine encrypts itself, as the one before.
struct TcpEngine : testing::TestWithParam<Options> {
  const Options options = GetParam();
  const bool encrypts = options.encrypt;
};
INSTANTIATE_TEST_SUITE_P(Kinds, TcpEngine,
                         testing::Values(Options{}, Options{.local = "", .encrypt = true},
                                         Options{.local = "", .encrypt = true, .kernel = true}),
                         [](const auto& i) {
                           return i.param.kernel ? "by_the_kernel" : i.param.encrypt ? "encrypted" : "plain";
                         });

TEST_P(TcpEngine, AFlippedBitOfAFrameEndsTheConnectionAndIsNeverActedOn) {
  const std::string hello = "who I am", message = "step 41 is done";
  constexpr std::size_t kHeader = 56;
  const std::size_t record = encrypts ? RecordCipher::kOverhead : 0;
  const std::size_t bits = 8 * (3 * kHeader + 72 + hello.size() + message.size() + record);
  auto server = make_engine(options), client = make_engine(options);
  ASSERT_TRUE(server && client);
  const auto address = (*server)->listen({"127.0.0.1:0"});
  ASSERT_TRUE(address);
  const auto port = static_cast<std::uint16_t>(std::stoi(address->text.substr(address->text.rfind(':') + 1)));
  for (std::size_t bit = 0; bit < bits; bit += options.kernel ? 101 : 1) {
    SCOPED_TRACE(bit);
    Wire wire(port, bit);
    const auto endpoint = (*client)->connect({fmt::format("127.0.0.1:{}", wire.port())}, as_bytes(hello));
    ASSERT_TRUE(endpoint);
    std::optional<EndpointId> accepted;
    bool sent = false, refused = false;
    const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(5);
    while (!refused && SteadyClock().now() < deadline) {
      wire.pump();
      for (const auto& event : (*server)->poll()) {
        if (event.kind == EventKind::accepted) {
          accepted = event.endpoint;
          EXPECT_EQ(as_text(event.message), hello);
        }
        if (event.kind == EventKind::closed) refused = true;
        ASSERT_NE(event.kind, EventKind::message) << as_text(event.message);
      }
      for (const auto& event : (*client)->poll()) {
        // Of a record whose length is damaged the rest is waited for.
        if (event.kind == EventKind::connected)
          sent = (*client)->send(*endpoint, as_bytes(message)) && (*client)->send(*endpoint, Bytes(64 * KiB));
        if (event.kind == EventKind::closed) refused = true;
      }
    }
    ASSERT_TRUE(refused) << (sent ? "the message was neither taken nor refused" : "the greeting was");
    (*client)->close(*endpoint);
    if (accepted) (*server)->close(*accepted);
  }
}

TEST_P(TcpEngine, WhoReadsTheWireReadsWhatIsNotEncrypted) {
  auto server = *make_engine(options), client = *make_engine(options);
  const auto address = *server->listen({"127.0.0.1:0"});
  Wire wire(static_cast<std::uint16_t>(std::stoi(address.text.substr(address.text.rfind(':') + 1))), ~std::size_t{0});
  const auto endpoint = *client->connect({fmt::format("127.0.0.1:{}", wire.port())}, {});
  const std::string message = "the weights of a model that nobody else may see";
  bool heard = false;
  for (const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
       !heard && SteadyClock().now() < deadline;) {
    wire.pump();
    for (const auto& event : client->poll())
      if (event.kind == EventKind::connected) EXPECT_TRUE(client->send(endpoint, as_bytes(message)));
    for (const auto& event : server->poll())
      if (event.kind == EventKind::message) heard = as_text(event.message) == message;
  }
  EXPECT_TRUE(heard);
  EXPECT_EQ(wire.seen().find(message) != std::string::npos, !encrypts);
}

TEST_P(TcpEngine, AnEncryptedSideAndOneThatIsNotRefuseEachOther) {
  auto server = *make_engine(options), client = *make_engine({.local = "", .encrypt = !encrypts});
  const auto endpoint = *client->connect({server->listen({"127.0.0.1:0"})->text}, {});
  std::optional<EventKind> end;
  for (const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
       !end && SteadyClock().now() < deadline;) {
    for (const auto& event : server->poll()) ADD_FAILURE() << "the server has event " << static_cast<int>(event.kind);
    for (const auto& event : client->poll()) end = event.kind;
  }
  EXPECT_EQ(end, EventKind::closed);
  client->close(endpoint);
}

// Who polls on lets its answers leave with what its handlers post; nobody else may have to poll once more.
TEST_P(TcpEngine, AnswersWaitForTheNextPollOnlyWhereOneIsSureToCome) {
  for (const bool polled_on : {false, true}) {
    auto server = make_engine(options).value(), client = make_engine(options).value();
    if (polled_on) server->set_polled_on();
    Bytes memory(4096);
    const auto target = server->register_region(memory, MemoryKind::host, Access::remote_write).value();
    const auto source = client->register_region(memory, MemoryKind::host, Access::local).value();
    const auto there = client->connect(server->listen({"127.0.0.1:0"}).value(), {}).value();
    const auto poll_until = [](Engine& engine, Engine* other, EventKind kind) {
      return within(std::chrono::seconds(20), [&] {
        if (other != nullptr) (void)other->poll();
        const auto events = engine.poll();
        return std::ranges::any_of(events, [&](const Event& event) { return event.kind == kind; });
      });
    };
    ASSERT_TRUE(poll_until(*client, server.get(), EventKind::connected));
    const Write write{
        .local = {source, 0}, .remote = {server->remote(target), 0}, .length = memory.size(), .notify = 1};
    ASSERT_TRUE(client->write(there, {&write, 1}));
    ASSERT_TRUE(poll_until(*server, client.get(), EventKind::written));
    if (polled_on) {
      EXPECT_FALSE(server->arm()) << "it may sleep with its answer unsent";
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(client->poll().empty());
      (void)server->poll();
    }
    EXPECT_TRUE(poll_until(*client, nullptr, EventKind::completed));
  }
}

// Of a caller, which is connected when it returns.
EndpointId connect_to(Engine& server, Engine& client) {
  const auto there = client.connect(server.listen({"127.0.0.1:0"}).value(), {}).value();
  bool connected = false, accepted = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : client.poll()) connected |= event.kind == EventKind::connected;
    for (const auto& event : server.poll()) accepted |= event.kind == EventKind::accepted;
    return connected && accepted;
  }));
  return there;
}

// Its memory has no address.
TEST_P(TcpEngine, AReadOfNothingIntoAnEmptyRegionEndsAsAnyOther) {
  auto server = make_engine(options).value(), client = make_engine(options).value();
  const auto there = connect_to(*server, *client);
  Bytes memory(16);
  const auto source = server->register_region(memory, MemoryKind::host, Access::remote_read).value();
  const auto target = client->register_region({}, MemoryKind::host, Access::local).value();
  const Read read{.context = 7, .local = {target, 0}, .remote = {server->remote(source), 0}, .length = 0};
  ASSERT_TRUE(client->read(there, {&read, 1}));
  std::vector<EventKind> heard;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)server->poll();
    for (const auto& event : client->poll()) heard.push_back(event.kind);
    return !heard.empty();
  }));
  EXPECT_EQ(heard, std::vector{EventKind::completed});
}

TEST(TcpEngines, ABurstOfLargeMessagesLeavesNoMemoryTakenUp) {
  constexpr int kPeers = 4, kMessages = 64;
  auto server = make_engine({}).value(), client = make_engine({}).value();
  std::vector<EndpointId> peers;
  for (int i = 0; i < kPeers; ++i) peers.push_back(connect_to(*server, *client));
  const Bytes large(Engine::kMaxMessage);
  const auto before = ::mallinfo2().uordblks;
  for (const auto peer : peers)
    for (int i = 0; i < kMessages; ++i) ASSERT_TRUE(client->send(peer, large));
  int heard = 0;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    (void)client->poll();
    for (const auto& event : server->poll()) heard += event.kind == EventKind::message;
    return heard == kPeers * kMessages;
  }));
  server.reset();  // what it has read in one go may be as much
  EXPECT_LT(::mallinfo2().uordblks, before + kPeers * kMessages * large.size() / 4);
}

// Its kernel takes the call; its process never says anything.
TEST(TcpEngines, AListenerThatDoesNotAnswerIsGivenUp) {
  const Wire silent(0, 0);
  auto client = make_engine({}).value();
  client->set_silence(std::chrono::milliseconds(20));
  (void)client->connect({fmt::format("127.0.0.1:{}", silent.port())}, {}).value();
  std::optional<Error> end;
  EXPECT_TRUE(within(std::chrono::seconds(5), [&] {
    for (const auto& event : client->poll())
      if (event.kind == EventKind::closed) end = event.error;
    return end.has_value();
  }));
  ASSERT_TRUE(end);
  EXPECT_EQ(end->code, ErrorCode::timeout);
}

// Nobody listens at the first of them: see name_server.h.
TEST(TcpEngines, APeerIsReachedByAnyAddressThatItsNameHas) {
  auto server = make_engine({}).value(), client = make_engine({}).value();
  const std::string address = server->listen({"127.0.0.1:0"})->text;
  const auto port = address.substr(address.rfind(':'));
  const auto endpoint = client->connect({"two.addresses.test" + port}, as_bytes("hello")).value();
  bool connected = false, accepted = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : client->poll()) {
      connected |= event.kind == EventKind::connected;
      if (event.kind == EventKind::closed) ADD_FAILURE() << event.error->message;
    }
    for (const auto& event : server->poll()) accepted |= event.kind == EventKind::accepted;
    return (connected && accepted) || testing::Test::HasFailure();
  }));
  client->close(endpoint);
}

// A listener that has all the callers that it takes: what comes is not answered.
struct Full {
  Fd listener;
  std::vector<Fd> callers;
  Full(const char* host, std::uint16_t port) {
    listener = Fd(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {}, .sin_zero = {}};
    EXPECT_EQ(::inet_pton(AF_INET, host, &address.sin_addr), 1);
    EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener.get(), 0), 0);
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
      (void)::connect(callers.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
    }
  }
};

// Whoever waits for the connection gives it up after a silence.
TEST(TcpEngines, AnAddressThatAnswersNothingDoesNotKeepThoseBehindItWaitingForASilence) {
  constexpr std::chrono::seconds silence(8);
  auto server = make_engine({}).value(), client = make_engine({}).value();
  client->set_silence(silence);
  const std::string address = server->listen({"127.0.0.1:0"})->text;
  const auto port = address.substr(address.rfind(':'));
  const Full full("127.0.0.9", static_cast<std::uint16_t>(std::stoi(port.substr(1))));
  (void)client->connect({"two.addresses.test" + port}, as_bytes("hello")).value();
  bool connected = false;
  EXPECT_TRUE(within(silence, [&] {
    for (const auto& event : client->poll()) connected |= event.kind == EventKind::connected;
    (void)server->poll();
    return connected;
  }));
}

// Of both ends: the kernel's timer is the one of an idle connection (2), and is over within the silence.
TEST(TcpEngines, AnIdleConnectionIsProbed) {
  auto server = make_engine({}).value(), client = make_engine({}).value();
  for (auto* engine : {server.get(), client.get()}) engine->set_silence(std::chrono::seconds(3));
  const std::string address = server->listen({"127.0.0.1:0"})->text;
  (void)client->connect({address}, as_bytes("hello")).value();
  bool connected = false, accepted = false;
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    for (const auto& event : client->poll()) connected |= event.kind == EventKind::connected;
    for (const auto& event : server->poll()) accepted |= event.kind == EventKind::accepted;
    return connected && accepted;
  }));
  const std::string port = fmt::format(":{:04X}", std::stoi(address.substr(address.rfind(':') + 1)));
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    std::ifstream table("/proc/net/tcp");
    int probed = 0;
    for (std::string line; std::getline(table, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer;
      fields >> number >> local >> remote >> state >> queues >> timer;
      if (state != "01" || (!local.ends_with(port) && !remote.ends_with(port))) continue;
      probed += timer.starts_with("02:") && std::stoul(timer.substr(3), nullptr, 16) <= 3ul * ::sysconf(_SC_CLK_TCK);
    }
    return probed == 2;
  }));
}

TEST(TcpEngines, OneThatWantsTheKernelToEncryptAndOneThatDoesNotUnderstandEachOther) {
  for (const bool calls : {false, true}) {
    auto server = *make_engine({.local = "", .encrypt = true, .kernel = !calls}),
         client = *make_engine({.local = "", .encrypt = true, .kernel = calls});
    const auto endpoint = *client->connect({server->listen({"127.0.0.1:0"})->text}, {});
    std::string heard, answered;
    for (const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
         answered.empty() && SteadyClock().now() < deadline;) {
      for (const auto& event : client->poll()) {
        if (event.kind == EventKind::connected) EXPECT_TRUE(client->send(endpoint, as_bytes("question")));
        if (event.kind == EventKind::message) answered = as_text(event.message);
      }
      for (const auto& event : server->poll()) {
        if (event.kind != EventKind::message) continue;
        heard = as_text(event.message);
        EXPECT_TRUE(server->send(event.endpoint, as_bytes("answer")));
      }
    }
    EXPECT_EQ(heard, "question");
    EXPECT_EQ(answered, "answer");
  }
}

}  // namespace
}  // namespace rejoin::transport::tcp
