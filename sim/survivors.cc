#include "sim/survivors.h"

#include <fmt/format.h>

#include <algorithm>

namespace rejoin::sim {

void Survivors::on_record(const proto::LogRecord& record, Holders holders) {
  if (record.has_committed()) {
    committed_ = record.committed().step();
    holders_ = std::move(holders);
  }
  if (record.has_epoch()) add(std::move(holders));
  if (record.has_rolled_back()) {
    if (record.rolled_back().version() < committed_ && lives())
      violation_ = fmt::format("the job goes back to step {}, though replica {} lives and holds step {}",
                               record.rolled_back().version(), holders_.begin()->first, committed_);
    committed_ = record.rolled_back().version();
    holders_.clear();
  }
}

void Survivors::on_end(std::uint64_t process, bool gave_up, const std::string& why) {
  const auto of = std::find_if(holders_.begin(), holders_.end(), [&](const auto& holder) {
    return std::find(holder.second.begin(), holder.second.end(), process) != holder.second.end();
  });
  if (of == holders_.end()) return;
  // The state before the first step is nobody's alone: each process starts with it.
  if (gave_up && holders_.size() == 1 && committed_ > 0)
    violation_ =
        fmt::format("replica {}, the last that held step {}, was made to leave: {}", of->first, committed_, why);
  holders_.erase(of);
}

}  // namespace rejoin::sim
