// What waits to be sent to one peer: messages, and answers to what the peer asks for. A peer that takes nothing, or
// asks for more than it takes, is taken for one that has gone when that comes to a bound. Writes and reads do not
// count: they are the caller's, who bounds them.
#pragma once

#include "base/bytes.h"
#include "base/fail.h"

namespace rejoin::transport {

class Unsent {
 public:
  static constexpr std::size_t kMost = 64 * MiB;
  void add(std::size_t bytes) { bytes_ += bytes; }
  void remove(std::size_t bytes) { bytes_ -= bytes; }
  void clear() { bytes_ = 0; }
  bool over() const { return bytes_ > kMost; }
  static std::string why() { return fmt::format("it does not take what is sent to it: {} wait", human_bytes(kMost)); }

 private:
  std::size_t bytes_ = 0;  // with what keeping them costs
};

}  // namespace rejoin::transport
