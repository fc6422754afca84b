// Whom something has happened to. The invariant healthy-stays: no process is put out whose replica has contributed
// since anything last was wrong with it. Knows nothing of why anyone is put out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace rejoin::sim {

class Health {
 public:
  explicit Health(std::uint32_t replicas) : replicas_(replicas) {}

  // Something is wrong with it, or with all of them, and may be felt until then.
  void harm(std::uint32_t replica, TimePoint until) { harm(replicas_[replica], until); }
  void harm_all(TimePoint until) { harm(all_, until); }
  // It stands still for less than a silence, and nothing else is wrong: that harms it only if something else happens
  // until then, which comes on top of it.
  void stall(std::uint32_t replica, TimePoint until) { stalled_ = {replica, until}; }
  void on_fault(TimePoint now) {
    if (stalled_ && now <= stalled_->second) harm(stalled_->first, stalled_->second);
    stalled_.reset();
  }
  // It contributes with all of its processes; all of them do.
  void see_whole(std::uint32_t replica, TimePoint now) { see_whole(replicas_[replica], now); }
  void see_all_whole(TimePoint now) { see_whole(all_, now); }

  bool healthy(std::uint32_t replica) const { return !all_.harmed && !replicas_[replica].harmed; }

 private:
  struct State {
    bool harmed = true;  // until it is seen whole
    TimePoint until{};
  };
  static void harm(State& state, TimePoint until) {
    state.harmed = true;
    state.until = std::max(state.until, until);
  }
  static void see_whole(State& state, TimePoint now) {
    if (now > state.until) state.harmed = false;
  }

  std::optional<std::pair<std::uint32_t, TimePoint>> stalled_;
  std::vector<State> replicas_;
  State all_;
};

}  // namespace rejoin::sim
