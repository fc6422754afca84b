// What the processes of one benchmark share: a page that is mapped before they fork.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin::bench {

constexpr std::uint32_t kMostProcesses = 64;

struct Meeting {
  std::atomic<std::uint32_t> arrived, round;
  std::atomic<std::uint32_t> failed;
  char addresses[kMostProcesses][2048];
  std::atomic<std::uint32_t> wrong;
  std::atomic<double> values[kMostProcesses];
};

// A Meeting in memory that the children of this process share. While it is there a child that ends by a signal, or with
// another status than 0, sets `failed`: nobody waits for it. One at a time.
class MeetingPage {
 public:
  static Result<MeetingPage> make();
  MeetingPage(MeetingPage&&) = default;
  ~MeetingPage();
  Meeting& operator*() const;

 private:
  explicit MeetingPage(Mapping mapping) : mapping_(std::move(mapping)) {}
  Mapping mapping_;
};

// The error of a process that gives up since another of the meeting has failed.
tl::unexpected<Error> another_failed();

// All `count` processes meet; false when one of them has failed. Who waits lets others run.
bool meet(Meeting& meeting, std::uint32_t count);

// Each gives one value, and has those of all, by rank; empty when one of them has failed. Collective.
std::vector<double> gather(Meeting& meeting, std::uint32_t rank, std::uint32_t count, double value);

std::uint32_t cores();  // of this machine

}  // namespace rejoin::bench
