// A state as of one step goes from one process's memory into others', whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "base/digest.h"
#include "base/fd.h"
#include "base/tests/cancelled_thread.h"
#include "base/tests/threads.h"
#include "checkpoint.pb.h"
#include "rejoin/checkpoint_limits.h"
#include "rejoin/checkpoint_transfer.h"
#include "rejoin/secret_address.h"
#include "transport/factory.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
constexpr Duration kLong = 20s;

Bytes some_bytes(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>((seed = seed * 1664525 + 1013904223) >> 24);
  return bytes;
}

struct CheckpointTransfer : testing::TestWithParam<std::string> {
  const std::vector<Bytes> state{some_bytes(9'000'001, 1), {}, some_bytes(1, 2), some_bytes(4 * MiB, 3)};
  std::unique_ptr<CheckpointServer> server;  // the last, so that it ends before what it offers

  void SetUp() override {
    auto opened = CheckpointServer::open({.transport = GetParam(), .listen = "127.0.0.1:0", .advertise = {}});
    ASSERT_TRUE(opened) << opened.error().message;
    server = std::move(*opened);
  }
  std::vector<std::span<const std::byte>> views() const { return {state.begin(), state.end()}; }
  Result<std::vector<Bytes>> fetch(std::uint64_t step, Duration limit = kLong) {
    auto opened = CheckpointFetch::open(GetParam(), server->address(), step, limit);
    if (!opened) return tl::unexpected(opened.error());
    EXPECT_EQ((*opened)->description(), "what it is");
    std::vector<Bytes> all;
    for (const auto size : (*opened)->sizes()) all.emplace_back(size);
    if (auto got = (*opened)->into({all.begin(), all.end()}, limit); !got) return tl::unexpected(got.error());
    return all;
  }
};

TEST_P(CheckpointTransfer, SeveralAtOnceGetAllBytesAndTheDescription) {
  ASSERT_TRUE(server->publish(7, "what it is", views()));
  auto other = std::async(std::launch::async, [&] { return fetch(7); });
  EXPECT_EQ(fetch(7), state);
  EXPECT_EQ(other.get(), state);
}

TEST_P(CheckpointTransfer, WhoComesEarlyWaitsForItsStepAndOneThatIsPastIsRefused) {
  ASSERT_TRUE(server->publish(6, "what it is", views()));
  auto early = std::async(std::launch::async, [&] { return fetch(7); });
  EXPECT_EQ(fetch(6), state);
  ASSERT_TRUE(server->publish(7, "what it is", views()));
  EXPECT_EQ(early.get(), state);
  const auto late = fetch(6);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::refused);
  EXPECT_THAT(late.error().message, HasSubstr("step 6 was asked for, and step 7 is published"));
}

// Signals are for the program's threads (session.h, "Signals").
TEST_P(CheckpointTransfer, TheServersThreadsTakeNoSignals) {
  server.reset();
  const std::size_t before = test::threads_that_take(SIGTERM);
  SetUp();
  EXPECT_EQ(test::threads_that_take(SIGTERM), before);
}

TEST_P(CheckpointTransfer, NothingIsReadAfterItHasBeenWithdrawn) {
  ASSERT_TRUE(server->publish(7, "what it is", views()));
  auto opened = CheckpointFetch::open(GetParam(), server->address(), 7, kLong);
  ASSERT_TRUE(opened);
  server->withdraw();
  std::vector<Bytes> all;
  for (const auto size : (*opened)->sizes()) all.emplace_back(size);
  const auto got = (*opened)->into({all.begin(), all.end()}, kLong);
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, ErrorCode::unavailable) << got.error().message;
  // … and the server goes on.
  const auto nowhere = server->publish(8, "what it is", {std::span(static_cast<const std::byte*>(nullptr), 100)});
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().message, "buffer 0 of 1 has 100 bytes at the address 0: give it memory");
  ASSERT_TRUE(server->publish(8, "what it is", views()));
  EXPECT_EQ(fetch(8), state);
}

TEST_P(CheckpointTransfer, WhoReadsIsWaitedForAndWhoDoesNotGoOnIsCutOff) {
  ASSERT_TRUE(server->publish(7, "what it is", views()));
  auto reader = CheckpointFetch::open(GetParam(), server->address(), 7, kLong);
  ASSERT_TRUE(reader);
  auto withdrawn = std::async(std::launch::async, [&] { return server->withdraw(Duration::max()); });
  std::vector<Bytes> all;
  for (const auto size : (*reader)->sizes()) all.emplace_back(size);
  EXPECT_TRUE((*reader)->into({all.begin(), all.end()}, kLong));
  EXPECT_EQ(withdrawn.get(), 0u);
  EXPECT_EQ(all, state);

  ASSERT_TRUE(server->publish(8, "what it is", views()));
  auto stopped = CheckpointFetch::open(GetParam(), server->address(), 8, kLong);
  auto gone = CheckpointFetch::open(GetParam(), server->address(), 8, kLong);
  ASSERT_TRUE(stopped && gone);
  gone->reset();
  EXPECT_EQ(server->withdraw(100ms), 1u);
  // … and is not waited for again, though the same step is published once more.
  ASSERT_TRUE(server->publish(8, "what it is", views()));
  EXPECT_EQ(server->withdraw(kLong), 0u);

  ASSERT_TRUE(server->publish(9, "what it is", views()));
  auto other = CheckpointFetch::open(GetParam(), server->address(), 9, kLong);
  ASSERT_TRUE(other);
  EXPECT_EQ(server->withdraw(kLong, [] { return true; }), 1u) << "an interrupt ends the wait";
}

// What has withdrawn, and goes, leaves nothing with the server's thread, which is woken when a fetch goes.
TEST_P(CheckpointTransfer, WhatCancelledThrowsPassesThroughWhenTheStateIsWithdrawn) {
  struct Signal {};
  const auto throwing = []() -> bool { throw Signal(); };
  std::vector<Bytes> all;
  for (const auto& buffer : state) all.emplace_back(buffer.size());
  for (const bool thread_goes : {false, true}) {
    ASSERT_TRUE(server->publish(7, "what it is", views()));
    auto reader = CheckpointFetch::open(GetParam(), server->address(), 7, kLong);
    auto other = CheckpointFetch::open(GetParam(), server->address(), 7, kLong);
    ASSERT_TRUE(reader && other);
    if (thread_goes) {
      const auto ended = in_cancelled_thread([&] { server->withdraw(kLong); });
      EXPECT_TRUE(ended.cancelled && !ended.came_back);
    } else {
      EXPECT_THROW(server->withdraw(kLong, throwing), Signal);
    }
    const auto got = (*reader)->into({all.begin(), all.end()}, kLong);
    ASSERT_FALSE(got) << "it is still published";
    EXPECT_EQ(got.error().code, ErrorCode::unavailable) << got.error().message;
    other->reset();
    ASSERT_TRUE(server->publish(8, "what it is", views()));
    EXPECT_EQ(fetch(8), state);
    server->withdraw(kLong);
  }
}

TEST(CheckpointServer, AChildIsToldThatItIsItsParentsAndWaitsForNothing) {
  for (const std::string transport : {"tcp", "shm", "tcp;threads=2"}) {
    const Bytes bytes = some_bytes(3 * MiB, 1);  // before its server, which ends before what it offers
    auto server = CheckpointServer::open({.transport = transport}).value();
    ASSERT_TRUE(server->publish(1, "", {bytes}));
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const auto told = server->publish(2, "", {bytes});
      const bool right = !told && told.error().code == ErrorCode::unavailable &&
                         told.error().message.find("make another in this process") != std::string::npos &&
                         server->withdraw(kLong) == 0;
      server.reset();
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << transport;
    auto fetch = CheckpointFetch::open(transport, server->address(), 1, kLong);
    ASSERT_TRUE(fetch) << transport << ": " << fetch.error().message;
    Bytes got(bytes.size());
    ASSERT_TRUE((*fetch)->into({got}, kLong));
    EXPECT_EQ(got, bytes);
  }
}

TEST(CheckpointServer, AThreadThatIsBeingCancelledDestroysOneAndAFetch) {
  auto server = CheckpointServer::open({.transport = "tcp"}).value();
  ASSERT_TRUE(server->publish(1, "", {}));
  auto fetch = CheckpointFetch::open("tcp", server->address(), 1, kLong).value();
  EXPECT_TRUE(in_cancelled_thread([&] { fetch.reset(), server.reset(); }).came_back);
}

TEST(CheckpointServer, WithRailsIsReachedByAProcessWithOthersAndByNoOtherTransport) {
  const Bytes bytes = some_bytes(3 * MiB, 1);
  auto server = CheckpointServer::open(
      {.transport = "tcp:127.0.0.1,127.0.0.2", .listen = "127.0.0.1:0|127.0.0.2:0", .advertise = {}});
  ASSERT_TRUE(server) << server.error().message;
  ASSERT_TRUE((*server)->publish(1, "", {bytes}));
  auto fetch = CheckpointFetch::open("tcp:127.0.0.3,127.0.0.4", (*server)->address(), 1, kLong);
  ASSERT_TRUE(fetch) << fetch.error().message;
  Bytes got(bytes.size());
  ASSERT_TRUE((*fetch)->into({got}, kLong));
  EXPECT_EQ(got, bytes);
  const auto other = CheckpointFetch::open("tcp", (*server)->address(), 1, kLong);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::mismatch) << other.error().message;
}

TEST_P(CheckpointTransfer, BytesThatChangedMeanwhileAreNotTaken) {
  auto mine = state;
  ASSERT_TRUE(server->publish(7, "what it is", {mine.begin(), mine.end()}));
  mine[0][5'000'000] ^= std::byte{1};
  const auto got = fetch(7);
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, ErrorCode::corrupt);
  server->withdraw();
}

TEST_P(CheckpointTransfer, ADeadlineAndAnInterruptEndTheWait) {
  const auto late = fetch(7, 300ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::timeout);
  EXPECT_THAT(late.error().message, HasSubstr("timed out waiting for step 7 to be published"));
  const auto cancelled = CheckpointFetch::open(GetParam(), server->address(), 7, kLong, [] { return true; });
  ASSERT_FALSE(cancelled);
  EXPECT_EQ(cancelled.error().code, ErrorCode::cancelled);
}

// Of a server whose process stands still.
TEST(CheckpointFetch, WhatCancelledThrowsPassesThroughAndTheFetchIsOver) {
  struct Signal {};
  int pipe[2] = {-1, -1};
  ASSERT_EQ(::pipe(pipe), 0);
  const Fd from(pipe[0]), to(pipe[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    auto server = CheckpointServer::open({.transport = "tcp"}).value();
    const Bytes bytes = some_bytes(MiB, 1);
    if (!server->publish(7, "", {bytes})) ::_exit(1);
    (void)!::write(to.get(), server->address().c_str(), server->address().size());
    for (;;) ::pause();
  }
  std::string address(1000, '\0');
  const auto size = ::read(from.get(), address.data(), address.size());
  ASSERT_GT(size, 0);
  address.resize(static_cast<std::size_t>(size));
  bool throws = false;
  auto fetch = CheckpointFetch::open("tcp", address, 7, kLong, [&]() -> bool {
                 if (throws) throw Signal();
                 return false;
               }).value();
  ::kill(child, SIGSTOP);
  ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  throws = true;
  Bytes got(MiB);
  EXPECT_THROW((void)fetch->into({got}, kLong), Signal);
  const auto again = fetch->into({got}, kLong);
  ASSERT_FALSE(again);
  EXPECT_THAT(again.error().message, HasSubstr("this fetch is over"));
  fetch.reset();
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_P(CheckpointTransfer, WhoDoesNotKnowTheAddressIsNotLetIn) {
  ASSERT_TRUE(server->publish(7, "what it is", views()));
  auto guessed = *SecretAddress::parse(kCheckpointScheme, kNoCheckpointServer, server->address());
  EXPECT_EQ(guessed.text(kCheckpointScheme), server->address());
  guessed.secret[1] ^= 1;
  const auto opened = CheckpointFetch::open(GetParam(), guessed.text(kCheckpointScheme), 7, kLong);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::unavailable) << opened.error().message;
}

// What somebody on the way of a connection that is not encrypted can do after its handshake, and what a server of
// before does, whose secret has another end.
TEST(CheckpointFetch, ADescriptionThatTheServerHasNotProvenIsNotGivenToTheCaller) {
  for (const bool proving : {true, false}) {
    auto engine = transport::make_engine("tcp").value();
    SecretAddress own{.secret = {1, proving ? kProves : kProves + 1}, .family = SecretAddress::family_of("tcp")};
    engine->set_secrets({transport::Secret::of(own.secret)});
    own.address = engine->listen({"127.0.0.1:0"}).value().text;
    proto::CheckpointContents contents;
    contents.set_description("to be run");
    contents.set_slice_bytes(1);
    std::string text = contents.SerializeAsString();
    const std::span memory = std::as_writable_bytes(std::span(text));
    const auto region =
        engine->register_region(memory, transport::MemoryKind::host, transport::Access::remote_read).value();
    auto fetched = std::async(std::launch::async,
                              [&] { return CheckpointFetch::open("tcp", own.text(kCheckpointScheme), 7, kLong); });
    while (fetched.wait_for(1ms) != std::future_status::ready)
      for (const auto& event : engine->poll()) {
        if (event.kind == transport::EventKind::accepted)
          EXPECT_EQ(as_text(event.message) != as_text(bytes_of(own.secret)), proving) << "who overhears it has it";
        if (event.kind != transport::EventKind::message) continue;
        proto::CheckpointOffer offer;
        offer.set_step(7);
        offer.set_key(engine->remote(region).key);
        offer.set_length(text.size());
        offer.set_digest(digest(as_bytes(text)));
        EXPECT_TRUE(engine->send(event.endpoint, as_bytes(offer.SerializeAsString())));
      }
    const auto got = fetched.get();
    EXPECT_EQ(got.has_value(), !proving);
    if (!got) EXPECT_EQ(got.error().code, ErrorCode::corrupt) << got.error().message;
    else EXPECT_EQ((*got)->description(), "to be run");
  }
}

// One of before shows the secret itself.
TEST(CheckpointServer, AHelloOfBeforeIsTaken) {
  auto server = CheckpointServer::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}}).value();
  const auto address = *SecretAddress::parse(kCheckpointScheme, kNoCheckpointServer, server->address());
  EXPECT_TRUE(proves(address.secret));
  ASSERT_TRUE(server->publish(7, "what it is", {}));
  auto engine = transport::make_engine("tcp").value();
  const auto endpoint =
      engine->connect({address.address, transport::Secret::of(address.secret)}, bytes_of(address.secret)).value();
  proto::CheckpointRequest request;
  request.set_step(7);
  std::optional<proto::CheckpointOffer> offer;
  const TimePoint deadline = SteadyClock().now() + kLong;
  while (!offer && SteadyClock().now() < deadline)
    for (const auto& event : engine->poll()) {
      if (event.kind == transport::EventKind::connected)
        EXPECT_TRUE(engine->send(endpoint, as_bytes(request.SerializeAsString())));
      if (event.kind == transport::EventKind::message)
        offer.emplace().ParseFromArray(event.message.data(), static_cast<int>(event.message.size()));
    }
  ASSERT_TRUE(offer);
  EXPECT_EQ(offer->step(), 7u);
}

TEST_P(CheckpointTransfer, AServerThatGoesIsSeenBeforeTheDeadline) {
  auto waiting = std::async(std::launch::async, [&, address = server->address()] {
    return CheckpointFetch::open(GetParam(), address, 7, kLong).error().code;
  });
  ASSERT_TRUE(server->publish(1, "what it is", views()));  // the server is in its loop
  server.reset();
  EXPECT_EQ(waiting.get(), ErrorCode::unavailable);
}

INSTANTIATE_TEST_SUITE_P(Over, CheckpointTransfer, testing::Values("tcp", "tcp+aes", "shm", "tcp:127.0.0.1,127.0.0.1"),
                         [](const auto& over) {
                           return over.param == "tcp+aes" ? "encrypted" : over.param.size() > 3 ? "rails" : over.param;
                         });

TEST(SecretAddress, WhatIsNoneIsNamed) {
  for (const std::string text : {"", "http://host:1", "rejoin-checkpoint-1 12 tcp a:1",
                                 "rejoin-checkpoint-1 0123456789abcdef0123456789abcdeg tcp a:1"}) {
    const auto parsed = SecretAddress::parse(kCheckpointScheme, kNoCheckpointServer, text);
    ASSERT_FALSE(parsed);
    EXPECT_THAT(parsed.error().message, HasSubstr("'" + text + "'"));
  }
}

}  // namespace
}  // namespace rejoin
