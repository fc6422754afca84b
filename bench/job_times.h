// What flight recordings say of a job's steps: where the time of a step goes, and how soon survivors go on. The
// processes are of one machine, so their clocks are one.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "daemon/recording.h"

namespace rejoin::bench {

// Values of one kind, in any unit.
class Distribution {
 public:
  Distribution() = default;
  explicit Distribution(std::vector<double> values);
  double mean() const;
  double at(double share) const;  // the smallest value that so large a share of all are not above; of nothing 0
  double most() const { return at(1); }
  std::size_t size() const { return sorted_.size(); }

 private:
  std::vector<double> sorted_;
};

// The parts of a step, each beginning where the one before ends.
struct Part {
  std::string_view name, what;
};
inline constexpr std::array kParts{
    Part{"calls", "the trainer, from begin_step()'s return to its call of all_reduce()"},
    Part{"wake-up", "all_reduce() wakes the progress thread, which starts the operation"},
    Part{"others", "the other replicas have not begun theirs"},
    Part{"all-reduce", "from when all have begun it"},
    Part{"report", "its results are compared, and this rank's report is made"},
    Part{"slowest", "the other ranks' reports are not made yet"},
    Part{"gather", "the reports' way: trainer, daemon's wake-up, coordinator's wake-up, its decision"},
    Part{"log", "the coordinator writes the decision and syncs it"},
    Part{"plan", "the decision's way: coordinator, daemon's wake-up, the progress thread's wake-up"},
    Part{"update", "the trainer's wake-up, and its update, which is empty"},
    Part{"next step", "from the end of the update to begin_step()'s return"},
};

struct Steps {
  std::array<std::vector<double>, kParts.size()> parts;  // µs, of each step of each trainer
  std::vector<double> whole;                             // … from one begin_step()'s return to the next one's
};

// Of the steps from `first` to before `end` that all of these have whole, in one epoch and with one bucket.
Steps steps_of(const std::vector<daemon::Recording>& trainers, const daemon::Recording& coordinator,
               std::uint64_t first, std::uint64_t end);

// When a survivor went on after `since`: ns from then. Nothing of what has not happened yet.
struct GoingOn {
  std::optional<double> epoch, all_reduce, commit;
};
// `epoch`: it heard of the next epoch; `all_reduce`, `commit`: the end of its first all-reduce, and the first commit
// that it heard of, in that one.
GoingOn going_on(const daemon::Recording& survivor, TimePoint since);

}  // namespace rejoin::bench
