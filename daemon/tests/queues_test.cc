// What waits in a daemon's queues is bounded. Control connections: framed_test.cc; callers of the status:
// status_server_test.cc.
#include <gtest/gtest.h>

#include <future>

#include "daemon/stream_thread.h"

namespace rejoin::daemon {
namespace {

struct Stream {
  std::unique_ptr<StreamThread> thread = [] {
    auto started =
        StreamThread::start("shm", device::make_host(), true, "127.0.0.1:0", {}, {}, [](StreamThread::Report) {});
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
