// Who calls a UCX listener without the secret: refused, whatever it sends, and harmless to those who have it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/deadlines.h"
#include "transport/handshake.h"
#include "transport/strangers.h"
#include "transport/tests/within.h"
#include "transport/ucx/address.h"
#include "transport/ucx/factory.h"
#include "transport/ucx/library.h"
#include "transport/ucx/wire.h"

namespace rejoin::transport::ucx {
namespace {

constexpr char kTransports[] = "tcp,self";
const Secret kKey = Secret::of({7, 1}), kOther = Secret::of({7, 2});

struct Listener {
  explicit Listener(Duration silence = deadlines::kSilence) : engine(make_engine({.transports = kTransports}).value()) {
    engine->set_silence(silence);
    engine->set_secrets({kKey});
    address = engine->listen({}).value();
  }
  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted) hellos.emplace_back(as_text(event.message));
      else ++others;
    }
  }
  std::unique_ptr<Engine> engine;
  Address address;
  std::vector<std::string> hellos;
  int others = 0;  // events of other kinds
};

// What a client of this secret meets.
std::optional<Error> connect_with(Listener& listener, const Secret& secret) {
  auto client = make_engine({.transports = kTransports}).value();
  (void)client->connect({listener.address.text, secret}, as_bytes("hello")).value();
  std::optional<Error> error;
  bool connected = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    for (const auto& event : client->poll()) {
      connected = connected || event.kind == EventKind::connected;
      if (event.kind == EventKind::closed) error = event.error;
    }
    return connected || error;
  }));
  return error;
}

// A stranger: UCX alone, and what it sends is what the test wants.
class Stranger {
 public:
  explicit Stranger(const Listener& listener) {
    ucp_config_t* config = nullptr;
    EXPECT_EQ(ucx().config_read("REJOIN", nullptr, &config), UCS_OK);
    ucx().config_modify(config, "TLS", kTransports);
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    EXPECT_EQ(ucx().init(&params, config, &context_), UCS_OK);
    ucx().config_release(config);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    EXPECT_EQ(ucx().worker_create(context_, &worker, &worker_), UCS_OK);
    handle(wire::challenge, &Stranger::on_challenge);
    handle(wire::welcome, &Stranger::on_welcome);
    handle(wire::goodbye, &Stranger::on_goodbye);
    ucp_address_t* address = nullptr;
    std::size_t length = 0;
    EXPECT_EQ(ucx().worker_get_address(worker_, &address, &length), UCS_OK);
    const auto* bytes = reinterpret_cast<const std::byte*>(address);
    address_.assign(bytes, bytes + length);
    ucx().worker_release_address(worker_, address);
    const Bytes there = parse_address(listener.address.text).value();
    ucp_ep_params_t endpoint{};
    endpoint.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    endpoint.address = reinterpret_cast<const ucp_address_t*>(there.data());
    endpoint.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    EXPECT_EQ(ucx().ep_create(worker_, &endpoint, &endpoint_), UCS_OK);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  ~Stranger() {
    ucx().worker_destroy(worker_);
    ucx().cleanup(context_);
  }

  template <typename Header>
  void send(wire::Kind kind, const Header& header, BytesView body) {
    const Bytes& kept = sent_.emplace_back(joined(header, body));  // UCX may send it later
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    void* request = ucx().am_send_nbx(endpoint_, kind, kept.data(), sizeof header, kept.data() + sizeof header,
                                      body.size(), &param);
    if (UCS_PTR_IS_PTR(request)) ucx().request_free(request);
  }
  void call(std::uint64_t from = 1) {
    send(wire::call, wire::Call{wire::kMagic, from, handshake::name_of(kKey), nonce}, address_);
  }
  void poll() {
    while (ucx().worker_progress(worker_) != 0) {
    }
  }

  const Nonce nonce = make_nonce();
  std::vector<wire::Challenge> challenges;
  std::vector<std::uint64_t> welcomes;  // to these
  int goodbyes = 0;

 private:
  void handle(unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.cb = callback;
    handler.arg = this;
    EXPECT_EQ(ucx().worker_set_am_recv_handler(worker_, &handler), UCS_OK);
  }
  static ucs_status_t on_challenge(void* self, const void* header, std::size_t size, void*, std::size_t,
                                   const ucp_am_recv_param_t*) {
    wire::Challenge challenge;
    EXPECT_EQ(size, sizeof challenge);
    std::memcpy(&challenge, header, sizeof challenge);
    static_cast<Stranger*>(self)->challenges.push_back(challenge);
    return UCS_OK;
  }
  static ucs_status_t on_welcome(void* self, const void* header, std::size_t, void*, std::size_t,
                                 const ucp_am_recv_param_t*) {
    wire::Welcome welcome;
    std::memcpy(&welcome, header, sizeof welcome);
    static_cast<Stranger*>(self)->welcomes.push_back(welcome.to);
    return UCS_OK;
  }
  static ucs_status_t on_goodbye(void* self, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
    ++static_cast<Stranger*>(self)->goodbyes;
    return UCS_OK;
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  Bytes address_;
  std::deque<Bytes> sent_;
};

[[nodiscard]] bool until(Listener& listener, Stranger& stranger, const std::function<bool()>& done) {
  return within(std::chrono::seconds(20), [&] {
    listener.poll();
    stranger.poll();
    return done();
  });
}

TEST(StrangersOfUcx, WhoHasTheSecretComesInWithItsHello) {
  Listener listener;
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_THAT(listener.hellos, testing::ElementsAre("hello"));
}

TEST(StrangersOfUcx, WhoHasTheOtherOfTwoSecretsComesInToo) {
  Listener listener;
  listener.engine->set_secrets({kKey, kOther});
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_FALSE(connect_with(listener, kOther));
  EXPECT_TRUE(connect_with(listener, Secret::of({7, 3})));
}

TEST(StrangersOfUcx, AnotherSecretIsRefusedByTheCallerWhoHearsWhy) {
  Listener listener;
  for (const Secret& wrong : {kOther, Secret{}}) {
    const auto error = connect_with(listener, wrong);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::refused);
    EXPECT_THAT(error->message, testing::HasSubstr("has not proven that it knows this connection's secret"));
  }
  EXPECT_TRUE(listener.hellos.empty());
}

// Nothing of the handshake is a proof for who has not the secret: what the listener has shown, what belongs to other
// nonces or to another hello.
TEST(StrangersOfUcx, WhatIsNoProofIsRefused) {
  Listener listener;
  Stranger stranger(listener);
  const Bytes hello = joined(std::uint32_t{1}, as_bytes("let me in"));
  const auto proofs = [&](const wire::Challenge& challenge) {
    return std::vector<Mac>{Mac{}, challenge.proof,
                            handshake::prove_caller(kOther, stranger.nonce, challenge.nonce, hello),
                            handshake::prove_caller(kKey, challenge.nonce, stranger.nonce, hello),
                            handshake::prove_caller(kKey, stranger.nonce, challenge.nonce, as_bytes("something else"))};
  };
  const std::size_t tries = proofs({}).size();
  for (std::size_t i = 0; i < tries; ++i) {
    stranger.call();
    ASSERT_TRUE(until(listener, stranger, [&] { return stranger.challenges.size() == i + 1; }));
    const wire::Challenge& challenge = stranger.challenges.back();
    EXPECT_EQ(challenge.proof, handshake::prove_listener(kKey, stranger.nonce, challenge.nonce));
    // Before it has proven itself nothing else of it is listened to.
    stranger.send(wire::message, wire::Message{challenge.from, 0}, as_bytes("early"));
    stranger.send(wire::read_request, wire::ReadRequest{challenge.from, 1, 2, 0, 8}, {});
    stranger.send(wire::hello, wire::Hello{challenge.from, proofs(challenge)[i]}, hello);
    EXPECT_TRUE(until(listener, stranger, [&] { return stranger.goodbyes == static_cast<int>(i) + 1; })) << i;
  }
  EXPECT_TRUE(listener.hellos.empty());
  EXPECT_EQ(listener.others, 0);
  EXPECT_TRUE(stranger.welcomes.empty());
  EXPECT_FALSE(connect_with(listener, kKey));
}

// So the test before is one that can fail.
TEST(StrangersOfUcx, TheRightProofIsTaken) {
  Listener listener;
  Stranger stranger(listener);
  stranger.call();
  ASSERT_TRUE(until(listener, stranger, [&] { return !stranger.challenges.empty(); }));
  const wire::Challenge& challenge = stranger.challenges.back();
  stranger.send(wire::hello,
                wire::Hello{challenge.from, handshake::prove_caller(kKey, stranger.nonce, challenge.nonce, {})}, {});
  EXPECT_TRUE(until(listener, stranger, [&] { return stranger.welcomes.size() == 1; }));
  EXPECT_EQ(listener.hellos.size(), 1u);
}

TEST(StrangersOfUcx, WhoSaysNothingHasItsTimeAndNoMore) {
  Listener listener(std::chrono::milliseconds(10));
  Stranger stranger(listener);
  stranger.call();
  EXPECT_TRUE(until(listener, stranger, [&] { return stranger.goodbyes == 1; }));
}

TEST(StrangersOfUcx, ManyOfThemKeepNobodyOutAndTheOldestGo) {
  constexpr std::uint64_t kMany = Strangers::kMost + 44;
  Listener listener;
  Stranger stranger(listener);
  const auto has_challenge = [&](std::uint64_t to) {
    return std::any_of(stranger.challenges.begin(), stranger.challenges.end(),
                       [&](const wire::Challenge& challenge) { return challenge.to == to; });
  };
  stranger.call(1);
  ASSERT_TRUE(until(listener, stranger, [&] { return has_challenge(1); }));
  for (std::uint64_t i = 2; i <= kMany; ++i) stranger.call(i);
  ASSERT_TRUE(until(listener, stranger, [&] { return has_challenge(kMany); }));
  EXPECT_FALSE(connect_with(listener, kKey));
  EXPECT_EQ(listener.hellos.size(), 1u);
  for (const auto& challenge : stranger.challenges)  // each answers rightly now, the first of them too late
    stranger.send(wire::hello,
                  wire::Hello{challenge.from, handshake::prove_caller(kKey, stranger.nonce, challenge.nonce, {})}, {});
  EXPECT_TRUE(until(listener, stranger, [&] {
    return std::find(stranger.welcomes.begin(), stranger.welcomes.end(), kMany) != stranger.welcomes.end();
  }));
  EXPECT_THAT(stranger.welcomes, testing::Not(testing::Contains(1)));
  EXPECT_LE(stranger.welcomes.size(), Strangers::kMost);
}

// Its TCP needs the bounce buffer, however it came to be used.
TEST(UcxLists, TcpIsReckonedWithWhereverItIsNotExcludedByWhatIsListed) {
  for (const char* list : {"tcp,self", "all", "self,tcp", "^rc", "^posix,sysv,cma"})
    EXPECT_TRUE(may_use_tcp(list)) << list;
  for (const char* list : {"posix,cma,self", "rc_x,ud_x,self", "rc"}) EXPECT_FALSE(may_use_tcp(list)) << list;
}

}  // namespace
}  // namespace rejoin::transport::ucx
