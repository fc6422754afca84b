// Stores over real etcd members, asked one request after another.
#pragma once

#include <gtest/gtest.h>

#include <asio/io_context.hpp>
#include <atomic>
#include <optional>

#include "base/clock.h"
#include "daemon/etcd_store.h"
#include "daemon/tests/etcd_process.h"

namespace rejoin::daemon {

using membership::StoreAnswer;
using membership::StoreRequest;
using Kind = StoreRequest::Kind;
using Outcome = StoreAnswer::Outcome;

#define SKIP_WITHOUT_ETCD() \
  if (test::EtcdCluster::program().empty()) GTEST_SKIP() << "it needs the packages etcd-server and etcd-client"

// Another one for each test.
inline std::string own_prefix() {
  static std::atomic<int> count = 0;
  return "/rejoin/job" + std::to_string(++count) + "/";
}

// Runs what is under way until the condition holds.
inline bool until(asio::io_context& io, const std::function<bool()>& condition,
                  std::chrono::seconds limit = std::chrono::seconds(20)) {
  const TimePoint deadline = SteadyClock().now() + limit;
  while (!condition()) {
    if (SteadyClock().now() > deadline) return false;
    io.restart();
    io.run_one_for(std::chrono::milliseconds(20));
  }
  return true;
}

struct Client {
  asio::io_context io{1};
  std::unique_ptr<EtcdStore> store;
  Duration took{};  // the last request

  explicit Client(EtcdOptions options) {
    auto made = EtcdStore::create(io, std::move(options));
    if (made) store = std::move(*made);
    else ADD_FAILURE() << made.error().message;
  }

  StoreAnswer ask(const StoreRequest& request) {
    std::optional<StoreAnswer> answer;
    const TimePoint begun = SteadyClock().now();
    store->submit(request, [&](StoreAnswer said) { answer = std::move(said); });
    EXPECT_FALSE(answer) << "later, it says";
    EXPECT_TRUE(until(io, [&] { return answer.has_value(); }));
    took = SteadyClock().now() - begun;
    return answer.value_or(StoreAnswer{});
  }
  StoreAnswer claim(std::uint64_t token, const std::string& leader) {
    return ask({.kind = Kind::claim, .token = token, .value = leader});
  }
  StoreAnswer append(std::uint64_t token, std::uint64_t position, const std::string& entry) {
    return ask({.kind = Kind::append, .token = token, .position = position, .value = entry});
  }
  StoreAnswer renew(std::uint64_t token) { return ask({.kind = Kind::renew, .token = token, .value = "here"}); }
  StoreAnswer compact(std::uint64_t token, std::uint64_t position, const std::string& snapshot) {
    return ask({.kind = Kind::compact, .token = token, .position = position, .value = snapshot});
  }
  StoreAnswer read(std::uint64_t position = 0, bool recent = true) {
    return ask({.kind = Kind::read, .position = position, .recent = recent});
  }
  // Again until its outcome is known.
  StoreAnswer insist(const StoreRequest& request) {
    StoreAnswer answer;
    EXPECT_TRUE(test::eventually([&] { return (answer = ask(request)).outcome != Outcome::unknown; })) << answer.error;
    return answer;
  }
};

// Positions and entries, of a read.
using Entries = std::vector<std::pair<std::uint64_t, std::string>>;

}  // namespace rejoin::daemon
