// Who comes to a listener without the secret: refused, whatever they send and however many they are, and harmless to
// those who have it.
#include "transport/strangers.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/select.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "base/clock.h"
#include "transport/tests/strangers_support.h"

namespace rejoin::transport::tcp {
namespace {

using std::chrono::milliseconds;

TEST(Strangers, AreAsManyAsTheBoundAndHaveFiveSilencesAndTheOldestGo) {
  Strangers strangers;
  strangers.set_silence(milliseconds(100));
  TimePoint now{};
  for (std::uint64_t i = 1; i <= Strangers::kMost; ++i) strangers.add(EndpointId(i), now += milliseconds(1));
  EXPECT_FALSE(strangers.to_go(now));
  strangers.remove(EndpointId(2));
  strangers.add(EndpointId(1001), now);
  EXPECT_FALSE(strangers.to_go(now));
  strangers.add(EndpointId(1002), now);
  EXPECT_EQ(strangers.to_go(now), EndpointId(1));
  strangers.refuse(EndpointId(1), ErrorCode::timeout, "", Strangers::kTooLate);
  EXPECT_FALSE(strangers.to_go(now));
  const TimePoint third = TimePoint{} + milliseconds(3);
  while (now < third + milliseconds(500)) EXPECT_FALSE(strangers.to_go(now += milliseconds(1)));
  EXPECT_EQ(strangers.to_go(third + milliseconds(501)), EndpointId(3));
}

TEST(Strangers, AreNotLateForATimeInWhichNobodyLookedAtThem) {
  Strangers strangers;
  strangers.set_silence(milliseconds(100));
  TimePoint now = SteadyClock().now();
  strangers.add(EndpointId(1), now);
  for (int looks = 0; looks < 5; ++looks) EXPECT_FALSE(strangers.to_go(now += std::chrono::hours(1)));
  EXPECT_EQ(strangers.to_go(now += std::chrono::hours(1)), EndpointId(1)) << "but they don't stay for ever";
}

TEST(StrangersOfTcp, WhoHasTheSecretComesInWithItsHello) {
  Listener listener;
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_THAT(listener.hellos, testing::ElementsAre("hello"));
}

TEST(StrangersOfTcp, WhoHasTheOtherOfTwoSecretsComesInToo) {
  Listener listener;
  listener.engine->set_secrets({kKey, kOther});
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_FALSE(connect_with(listener, kOther));
  EXPECT_TRUE(connect_with(listener, Secret::of({7, 3})));
  listener.engine->set_secrets({kOther});
  EXPECT_TRUE(connect_with(listener, kKey));
  EXPECT_FALSE(connect_with(listener, kOther));
}

TEST(StrangersOfTcp, AnotherSecretIsRefusedByTheCallerWhoHearsWhy) {
  Listener listener;
  for (const Secret& wrong : {kOther, Secret{}}) {
    const auto error = connect_with(listener, wrong);
    ASSERT_TRUE(error);
    EXPECT_THAT(error->message, testing::HasSubstr("has not proven that it knows this connection's secret"));
  }
  EXPECT_TRUE(listener.accepted.empty());
}

[[nodiscard]] bool is_refused(Listener& listener, Stranger& stranger) {
  return within(std::chrono::seconds(20),
                [&] {
                  listener.poll();
                  return !stranger.received();
                }) &&
         listener.accepted.empty();
}

TEST(StrangersOfTcp, NothingThatTheListenerOrACallerHasSaidIsAProof) {
  Listener listener;
  // A caller's whole handshake, overheard.
  const Nonce nonce = make_nonce();
  Bytes overheard;
  {
    Stranger caller(listener.port);
    const auto challenge = challenged(listener, caller, nonce);
    overheard = joined(handshake::prove_caller(kKey, nonce, challenge.nonce, as_bytes("hello")), as_bytes("hello"));
    caller.send(wire::Kind::hello, overheard);
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return listener.poll(); }));
    listener.accepted.clear();
  }
  // An answer to the challenge.
  const auto expect_refused = [&](const char* what, wire::Kind kind, const auto& answer) {
    SCOPED_TRACE(what);
    Stranger stranger(listener.port);
    const Bytes body = answer(challenged(listener, stranger, nonce));
    stranger.send(kind, body);
    EXPECT_TRUE(is_refused(listener, stranger));
  };
  const auto always = [](BytesView bytes) {
    return [bytes](const Challenge&) { return Bytes(bytes.begin(), bytes.end()); };
  };
  expect_refused("the same once more", wire::Kind::hello, always(overheard));
  expect_refused("the listener's own proof", wire::Kind::hello,
                 [](const Challenge& challenge) { return joined(challenge.proof, as_bytes("hello")); });
  expect_refused("a proof for another hello", wire::Kind::hello, [&](const Challenge& challenge) {
    return joined(handshake::prove_caller(kKey, nonce, challenge.nonce, as_bytes("hello")), as_bytes("jello"));
  });
  expect_refused("two calls", wire::Kind::call, always(called(nonce)));
  expect_refused("a message instead", wire::Kind::message, always(as_bytes("let me in")));
  {
    SCOPED_TRACE("a hello without a challenge");
    Stranger stranger(listener.port);
    stranger.send(wire::Kind::hello, overheard);
    EXPECT_TRUE(is_refused(listener, stranger));
  }
}

TEST(StrangersOfTcp, GarbageAtEachByteOfTheHandshakeIsRefused) {
  const Nonce nonce = make_nonce();
  const std::size_t first = sizeof(wire::Header) + sizeof nonce + sizeof(std::uint64_t);
  const std::size_t whole = first + sizeof(wire::Header) + sizeof(Mac) + 5;
  std::mt19937_64 random(5);
  Listener listener;
  for (std::size_t at = 0; at < whole; ++at) {
    SCOPED_TRACE(at);
    const auto garbled = [&](wire::Kind kind, BytesView body, std::size_t from) {
      wire::Header header{.kind = kind, .length = body.size(), .operation = wire::kMagic};
      header.body_digest = wire::digest_of(body);
      header.digest = wire::digest_of_header(header);
      Bytes bytes = joined(header, body);
      for (std::size_t i = at < from ? bytes.size() : at - from; i < bytes.size(); ++i)
        bytes[i] ^= std::byte(1 + random() % 255);
      return bytes;
    };
    Stranger stranger(listener.port);
    if (at < first) {
      stranger.send(garbled(wire::Kind::call, called(nonce), 0));
      stranger.send(Bytes(8192));  // of a length that the garbage names
    } else {
      const auto challenge = challenged(listener, stranger, nonce);
      const auto proof = handshake::prove_caller(kKey, nonce, challenge.nonce, as_bytes("hello"));
      stranger.send(garbled(wire::Kind::hello, joined(proof, as_bytes("hello")), first));
      stranger.send(Bytes(8192));
    }
    EXPECT_TRUE(is_refused(listener, stranger));
  }
  EXPECT_FALSE(connect_with(listener, kKey));
}

// A session that codes nothing withdraws a region that it never had, and somebody may just be calling.
TEST(StrangersOfTcp, WhatWasNeverRegisteredCutsNobodyOffWhenItIsWithdrawn) {
  Listener listener;
  const Nonce nonce = make_nonce();
  Stranger calling(listener.port);
  const Bytes body = called(nonce);
  wire::Header header{.kind = wire::Kind::call, .length = body.size(), .operation = wire::kMagic};
  header.body_digest = wire::digest_of(body);
  header.digest = wire::digest_of_header(header);
  calling.send(joined(header, {}));
  EXPECT_FALSE(connect_with(listener, kKey)) << "that one's header is read by now";
  listener.engine->deregister(RegionId{});
  calling.send(body);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    const auto answer = calling.received();
    return answer && !answer->empty();
  }));
}

TEST(StrangersOfTcp, AThousandOfThemKeepNobodyOutAndTheOldestGo) {
  Listener listener;
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(std::make_unique<Stranger>(listener.port));
    listener.poll();
  }
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_EQ(listener.accepted.size(), 1u);
  std::size_t left = 0;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    left = 0;
    for (auto& stranger : strangers) left += stranger->received().has_value();
    return left <= Strangers::kMost;
  })) << left;
}

TEST(StrangersOfTcp, WhoSaysNothingHasItsTimeAndNoMore) {
  Listener listener(milliseconds(10));
  Stranger silent(listener.port), slow(listener.port);
  const Bytes one(1);
  slow.send(one);
  EXPECT_TRUE(is_refused(listener, silent));
  EXPECT_TRUE(is_refused(listener, slow));
}

// The proof lies in the socket: it came while the listener's process did something else.
TEST(StrangersOfTcp, WhoHasAnsweredIsHeardBeforeItIsJudgedBadly) {
  constexpr auto kSilence = milliseconds(20);
  Listener listener(kSilence);
  auto client = make_engine({}).value();
  const auto endpoint = client->connect({listener.address.text, kKey}, as_bytes("hello")).value();
  const auto sleeps = [&](Engine& engine) {
    pollfd waiting{engine.event_fd(), POLLIN, 0};
    return engine.poll().empty() && engine.arm() && ::poll(&waiting, 1, 1) == 0;
  };
  for (int turn = 0; turn < 2; ++turn) {  // the call, then its answer
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return sleeps(*client); }));
    if (turn == 0) ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return sleeps(*listener.engine); }));
  }
  const TimePoint late = SteadyClock().now() + 2 * deadlines::kDataProof.of(kSilence);
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] { return SteadyClock().now() > late; }));
  EXPECT_TRUE(within(std::chrono::seconds(5), [&] { return listener.poll(); }));
  client->close(endpoint);
}

// It has the secret; each of its writes is refused, and it hears none of that.
TEST(StrangersOfTcp, APeerThatAsksAndTakesNoAnswerIsGivenUp) {
  Listener listener;
  Stranger peer(listener.port);
  ASSERT_TRUE(comes_in(listener, peer));
  wire::Header header{.kind = wire::Kind::write, .operation = 1, .key = 1};
  header.digest = wire::digest_of_header(header);
  Bytes writes;
  for (int i = 0; i < 1000; ++i) writes.insert(writes.end(), bytes_of(header).begin(), bytes_of(header).end());
  std::optional<Error> end;
  std::uint64_t sent = 0;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    sent += peer.send_some(writes, sent % sizeof header);
    for (const auto& event : listener.engine->poll())
      if (event.kind == EventKind::closed) end = event.error;
    return end.has_value();
  }));
  ASSERT_TRUE(end);
  EXPECT_EQ(end->code, ErrorCode::exhausted);
  EXPECT_THAT(end->message, testing::HasSubstr("it does not take what is sent to it"));
  EXPECT_FALSE(connect_with(listener, kKey));
}

TEST(StrangersOfTcp, WithoutDescriptorsAListenerWaitsAndDoesNotSpin) {
#if defined(__clang__) && defined(__has_feature)
#if __has_feature(undefined_behavior_sanitizer)
  GTEST_SKIP() << "UBSan looks at objects through a pipe, and calls them damaged where it gets none";
#endif
#endif
  Listener listener;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  Stranger waits(listener.port);
  const Fd probe(::dup(0));
  const rlimit none{static_cast<rlim_t>(probe.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    // The kernel has nothing to wake this thread for, though a caller waits.
    fd_set ready;
    FD_ZERO(&ready);
    FD_SET(listener.engine->event_fd(), &ready);
    timeval at_once{};
    return ::select(listener.engine->event_fd() + 1, &ready, nullptr, nullptr, &at_once) == 0;
  }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_FALSE(connect_with(listener, kKey));
}

TEST(RegionKeys, CannotBeComputedFromEachOther) {
  // As it was: a counter, mixed by a function that can be inverted.
  const auto unmixed = [](std::uint64_t x) {
    const auto undo = [](std::uint64_t y, int shift) {
      std::uint64_t undone = y;
      for (int i = 0; i < 64 / shift; ++i) undone = y ^ (undone >> shift);
      return undone;
    };
    x = undo(x, 31) * 0x319642b2d24d8ec3;
    x = undo(x, 27) * 0x96de1b173f119089;
    return undo(x, 30);
  };
  Unguessable numbers;
  std::vector<std::uint64_t> steps;
  std::uint64_t last = unmixed(numbers.next());
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t next = unmixed(numbers.next());
    steps.push_back(next - last);
    last = next;
  }
  std::sort(steps.begin(), steps.end());
  EXPECT_EQ(std::unique(steps.begin(), steps.end()), steps.end());
}

}  // namespace
}  // namespace rejoin::transport::tcp
