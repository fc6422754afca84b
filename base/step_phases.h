// What a trainer's time went into, out of the events that it has written (events.h): the phases of each step.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace rejoin {

// Of one process, whose events come in order.
class StepPhases {
 public:
  struct Phase {
    std::string_view name;
    std::int64_t begun = 0, ended = 0;  // ns
  };
  // The phase that this event ends. It has begun where the one before it has ended; without a beginning (the file was
  // opened in the middle of a step) there is none.
  std::optional<Phase> ended_by(std::string_view kind, std::int64_t at) {
    if (kind == kStep) begun_ = at;
    for (const auto& [event, name] : kEnds)
      if (kind == event && begun_) return Phase{name, *std::exchange(begun_, at), at};
    return std::nullopt;
  }
  static bool begins(std::string_view kind) { return kind == kStep; }

 private:
  static constexpr std::string_view kStep = "step";
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kEnds{
      {{"computed", "compute"}, {"reduced", "reduce"}, {"committed", "commit"}, {"updated", "update"}}};
  std::optional<std::int64_t> begun_;  // of the phase under way
};

}  // namespace rejoin
