// The invariant state-survives: while one replica lives that holds the state of the last committed step, no committed
// step is lost. Knows which processes exist and what each has done, and nothing of what anyone believes of them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "control.pb.h"

namespace rejoin::sim {

class Survivors {
 public:
  // A record is on the coordinator's disk. `holders`: of a commit, the replicas all of whose processes have reduced
  // that step, and so hold its state or all that it takes to get there; of an epoch, its contributors; each with its
  // processes.
  using Holders = std::map<std::uint32_t, std::vector<std::uint64_t>>;
  void on_record(const proto::LogRecord& record, Holders holders);
  // These hold it, too: joiners of which the coordinator has heard that they have caught up.
  void add(Holders holders) { holders_.merge(holders); }
  // The log is another one, which ends with this commit.
  void begin_with(std::uint64_t committed) {
    committed_ = committed;
    holders_.clear();
  }
  // A process has ended: something killed it, or (`gave_up`) it left because of a message.
  void on_end(std::uint64_t process, bool gave_up, const std::string& why);

  bool lives() const { return !holders_.empty(); }
  std::optional<std::string> take_violation() { return std::exchange(violation_, std::nullopt); }

 private:
  std::uint64_t committed_ = 0;
  Holders holders_;  // that live
  std::optional<std::string> violation_;
};

}  // namespace rejoin::sim
