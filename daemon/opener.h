// The thread that opens what trainers offer, and opens and closes RDMA devices, which may take long: the daemon is not
// silent meanwhile. Everything here is called by one thread, the daemon's.
#pragma once

#include <asio.hpp>
#include <atomic>
#include <cstdint>
#include <future>

#include "base/clock.h"

namespace rejoin::daemon {

class Opener {
 public:
  Opener() : thread_(1) {}  // throws what std::thread does

  template <typename Task>
  void post(Task task) {
    ++posted_;
    asio::post(thread_, [this, task = std::move(task)]() mutable {
      task();
      ++turns_;
    });
  }
  // One more each silence, as long as the caller asks as often, or it stands: each task counts, as many may be waiting.
  std::uint64_t turns() const { return turns_; }
  void ask() {
    if (turns_ == posted_) post([] {});
  }
  bool ends_within(Duration longest) {  // all that it was given
    std::promise<void> ends;
    const auto ended = ends.get_future();
    post([ends = std::move(ends)]() mutable { ends.set_value(); });
    return ended.wait_for(longest) == std::future_status::ready;
  }
  void join() { thread_.join(); }

 private:
  std::uint64_t posted_ = 0;
  std::atomic<std::uint64_t> turns_{0};
  asio::thread_pool thread_;
};

}  // namespace rejoin::daemon
