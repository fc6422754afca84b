// A job that never was, as its coordinator's history has it.
#pragma once

#include "daemon/job_history.h"

namespace rejoin::daemon {

inline proto::LogRecord epoch(std::uint64_t number, std::uint64_t step, const std::string& states,
                              std::string reason = "x") {
  proto::LogRecord record;
  auto& begun = *record.mutable_epoch();
  begun.set_epoch(number);
  begun.set_step(step);
  begun.set_reason(std::move(reason));
  for (std::uint32_t r = 0; r < states.size(); ++r) {
    if (states[r] == '.') continue;
    auto& member = states[r] == 's' ? *begun.add_suspended() : *begun.add_members();
    member.set_replica(r);
    member.set_catching_up(states[r] == 'j');
  }
  return record;
}

inline proto::LogRecord commit(std::uint64_t step) {
  proto::LogRecord record;
  record.mutable_committed()->set_step(step);
  return record;
}

struct TellsHistory {
  JobHistory history{3};
  TimePoint now{std::chrono::hours(1)};
  std::uint64_t step = 0;
  void steps(int count, Duration each = std::chrono::seconds(1)) {
    for (; count > 0; --count) now += each, history.on_records({commit(++step)}, now);
  }
  void begins(std::uint64_t number, const std::string& states) {
    history.on_records({epoch(number, step + 1, states)}, now);
  }
};

}  // namespace rejoin::daemon
