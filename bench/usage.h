// What a stretch of work costs a process: CPU time of all of its threads, and system calls where they can be
// counted.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"

namespace rejoin::bench {

struct Used {
  double cpu_seconds = 0;
  std::uint64_t system_calls = 0;
  bool counted = true;  // the system calls are
  Used& operator+=(const Used& other);
};

// Of this process, or of one that it has started; all threads count, later ones too.
class Usage {
 public:
  explicit Usage(pid_t process = 0);
  // Since the object was made.
  Used now() const;
  bool counts_system_calls() const { return why_not_.empty(); }
  // Why system calls are not counted here, or empty.
  const std::string& why_not() const { return why_not_; }

 private:
  double cpu() const;
  std::uint64_t calls() const;
  pid_t process_;
  std::vector<Fd> counters_;  // of perf_event_open, for each thread and those that it starts
  std::string why_not_;
  double cpu_before_ = 0;
  std::uint64_t calls_before_ = 0;
};

}  // namespace rejoin::bench
