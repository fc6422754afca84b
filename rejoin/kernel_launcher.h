// The kernel launcher owns a thread that launches a reducer's kernel whenever one is wanted and no stream waits, and
// sees within a fifth of a second whether it has died, held or not: whoever has given it work hears of that. This
// thread may stand in the driver for as long as the driver likes, while those who give work go on.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "base/result.h"
#include "device/reducer.h"

namespace rejoin {

class KernelLauncher {
 public:
  explicit KernelLauncher(std::shared_ptr<device::Reducer> reducer);  // one with an external launcher
  ~KernelLauncher();                                                  // nothing is being given to the reducer
  // From now on the reducer calls it. Errors: `exhausted`, where the system gives no thread.
  Result<> start();

 private:
  void call();  // on any thread; it never waits for the driver
  void run();

  const std::shared_ptr<device::Reducer> reducer_;
  std::mutex mutex_;  // never held in the driver
  std::condition_variable called_;
  bool call_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace rejoin
