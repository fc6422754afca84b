// The invariant cut-alone: where the data network of one replica is cut from all others, who reach each other, and
// nothing else is wrong, that one alone is put out, in time, and the others go on. Knows nothing of who accuses whom.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/clock.h"
#include "control.pb.h"

namespace rejoin::sim {

class Isolation {
 public:
  // All others are members and contribute. `timed`: they do nothing but steps.
  void begin(std::uint32_t replica, std::uint32_t replicas, bool timed, TimePoint now, TimePoint until) {
    cut_ = {.replica = replica, .replicas = replicas, .timed = timed, .since = now, .until = until, .moved = now};
  }
  void end() { cut_.reset(); }  // something else is wrong, too

  // What is wrong, for people.
  std::optional<std::string> on_epoch(const proto::LogRecord::EpochBegun& begun, TimePoint now) {
    if (!lasts(now)) return std::nullopt;
    const auto is_in = [&](std::uint32_t replica) {
      return std::ranges::any_of(begun.members(), [&](const auto& m) { return m.replica() == replica; });
    };
    for (std::uint32_t replica = 0; replica < cut_->replicas; ++replica)
      if (replica != cut_->replica && !is_in(replica))
        return fmt::format("replica {} is put out, and it is replica {} that is cut from all others: {}", replica,
                           cut_->replica, begun.reason());
    const bool out = !is_in(cut_->replica);
    if (cut_->out && !out) return fmt::format("replica {} is taken in, and is cut from all others", cut_->replica);
    if (out && !cut_->out) cut_->moved = now;
    cut_->out = out;
    return std::nullopt;
  }
  void on_commit(TimePoint now) {
    if (cut_) cut_->moved = now;
  }
  std::optional<std::string> check(TimePoint now, Duration silence) const {
    if (!lasts(now) || !cut_->timed) return std::nullopt;
    if (!cut_->out && now - cut_->since > kFound * silence)
      return fmt::format("replica {} is cut from all others for {:.0f} ms, and is in", cut_->replica,
                         milliseconds(now - cut_->since));
    if (cut_->out && now - cut_->moved > kStep * silence)
      return fmt::format("replica {} is out, cut from all others, who have committed nothing for {:.0f} ms",
                         cut_->replica, milliseconds(now - cut_->moved));
    return std::nullopt;
  }

 private:
  static constexpr int kFound = 6, kStep = 5;  // silences
  struct Cut {
    std::uint32_t replica = 0, replicas = 0;
    bool timed = false, out = false;
    TimePoint since{}, until{};
    TimePoint moved{};  // the last commit, or when it was put out
  };
  bool lasts(TimePoint now) const { return cut_ && now < cut_->until; }

  std::optional<Cut> cut_;
};

}  // namespace rejoin::sim
