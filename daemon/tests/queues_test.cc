// What waits in a daemon's queues is bounded. Control connections: tests/framed_test.cc.
#include <gtest/gtest.h>

#include <asio.hpp>
#include <future>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "daemon/status_server.h"
#include "daemon/stream_thread.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;

TEST(StatusRequests, AreSoManyAtATimeAndOthersWaitUntilOneHasEnded) {
  asio::io_context io{1};
  auto server = StatusServer::start(io, "127.0.0.1:0", [] { return nlohmann::json::object(); });
  ASSERT_TRUE(server);
  const std::string address = (*server)->address();
  const tcp::endpoint where(asio::ip::address_v4::loopback(),
                            static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  std::vector<tcp::socket> idle;
  for (std::size_t i = 0; i < StatusServer::kMostRequests; ++i) idle.emplace_back(io).connect(where);
  tcp::socket late(io);
  late.connect(where);
  asio::write(late, asio::buffer(std::string("GET /status HTTP/1.1\r\n\r\n")));
  std::string answer;
  bool answered = false;
  asio::async_read_until(late, asio::dynamic_buffer(answer), "200 OK",
                         [&](asio::error_code error, std::size_t) { answered = !error; });
  for (int i = 0; i < 1000; ++i) io.poll();
  EXPECT_FALSE(answered);
  idle.pop_back();
  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(4);  // an idle one has five
  while (!answered && SteadyClock().now() < deadline) io.run_one_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(answered);
}

struct Stream {
  std::unique_ptr<StreamThread> thread = [] {
    auto started = StreamThread::start("shm", device::make_host(), "127.0.0.1:0", {}, {}, [](StreamThread::Report) {});
    EXPECT_TRUE(started) << started.error().message;
    return std::move(started.value());
  }();
  std::vector<int> done;
  void post(int what) {
    thread->post([this, what](catchup::Service&, TimePoint) { done.push_back(what); });
  }
  void post_latest(std::uint32_t rank, int what) {
    thread->post_latest({ReplicaId(0), RankId(rank)},
                        [this, what](catchup::Service&, TimePoint) { done.push_back(what); });
  }
};

// As while it registers the memory of another rank.
TEST(StreamCommands, OfEachRankOnlyTheLatestOfTheRepeatedOnesWaitsAndTheOrderOfTheOthersIsKept) {
  Stream stream;
  std::promise<void> begun, end;
  stream.thread->post([&](catchup::Service&, TimePoint) {
    begun.set_value();
    end.get_future().wait();
  });
  begun.get_future().wait();
  for (int step = 0; step < 1000; ++step)
    for (std::uint32_t rank = 1; rank <= 2; ++rank) stream.post_latest(rank, 10 * step + static_cast<int>(rank));
  stream.post(5);
  stream.post_latest(1, 20001);
  stream.post_latest(1, 30001);
  end.set_value();
  std::promise<void> all;
  stream.thread->post([&](catchup::Service&, TimePoint) { all.set_value(); });
  all.get_future().wait();
  EXPECT_EQ(stream.done, (std::vector<int>{9991, 9992, 5, 30001}));
}

}  // namespace
}  // namespace rejoin::daemon
