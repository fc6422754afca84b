// Launches a reducer's kernel whenever one is wanted and no stream waits, and looks after its health: the thread that
// may stand in the driver for as long as the driver likes, while the progress thread goes on.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "device/reducer.h"

namespace rejoin {

class Attendant {
 public:
  explicit Attendant(std::shared_ptr<device::Reducer> reducer);  // an attended one
  ~Attendant();
  // A launch is wanted. Any thread; never waits for the driver.
  void call();

 private:
  void run();

  const std::shared_ptr<device::Reducer> reducer_;
  std::mutex mutex_;  // never held in the driver
  std::condition_variable called_;
  bool call_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace rejoin
