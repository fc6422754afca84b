// A thread for work that may stand in a GPU's driver for long while nobody can wait: the digests of audits. Its name,
// rejoin-audit, is for people, and for the driver of software.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin {

class SideThread {
 public:
  // `ended`, an eventfd that outlives this, is signalled after each task.
  explicit SideThread(const Fd& ended) : ended_(ended) {}
  ~SideThread();     // waits for what is under way, and drops what has not begun
  Result<> start();  // errors: `exhausted`, where the system gives no thread
  // One task after the other, once it is started. Thread: any.
  void run(std::function<void()> work);

 private:
  void loop();

  const Fd& ended_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace rejoin
