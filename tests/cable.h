// A cable between two network interfaces, in a network namespace, on which everything takes its time: what netem does
// where a kernel has it.
#pragma once

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "base/fd.h"

namespace rejoin::test {

class Cable {
 public:
  // `network`: the file of the namespace. The interfaces are cable0 and cable1, and go with this.
  Cable(std::string network, std::chrono::microseconds one_way);
  ~Cable();
  std::string why() { return why_.get(); }  // there is none; empty: there is one. Once

 private:
  void run(const std::string& network);
  std::string lay(const std::string& network);
  void carry();

  const std::chrono::microseconds one_way_;
  Fd ends_[2], stop_;
  std::promise<std::string> laid_;
  std::future<std::string> why_ = laid_.get_future();
  std::thread thread_;
};

}  // namespace rejoin::test
