// One run of the demo's job, with what is done to it.
#pragma once

#include <deque>
#include <functional>

#include "examples/demo_plan.h"
#include "examples/demo_story.h"

namespace rejoin::demo {

struct Settings : Faults {
  JobSettings job;
  std::uint64_t pause_ms = 0;
  bool no_baseline = false, quiet = false, keep = false;
  std::string json, trace, directory;
  std::uint64_t limit_seconds = 600;
};

// The story is complete when go() returns.
class Run {
 public:
  Run(const Settings& settings, Plan plan, std::string directory)
      : s_(settings), plan_(std::move(plan)), job_(settings.job, directory), story_(directory + "/events") {}

  Result<> go();
  bool has_started() const { return has_started_; }  // all of the job's processes
  const Story& story() const { return story_; }
  nlohmann::json report() const;
  std::string left_out() const;  // of what was asked for: lines, or nothing

 private:
  // What trainers are started with for what is planned: where to wait for their end, what to get wrong.
  std::map<RankName, std::vector<std::string>> trainers_arguments() const;
  // Stops one or all, for a while.
  void pause(const char* kind, std::uint64_t step);
  // What is undone when --pause-ms are over.
  void later(std::function<Result<>()> what);
  Result<> mend(TimePoint now);
  // What is planned for the coordinator that leads, which has just said that it committed, and for its etcd.
  Result<> break_lead(const Event& commit);
  void break_leader(const char* kind, std::uint64_t step, const std::string& who, bool kill);
  std::vector<std::size_t> members_to_break();  // of etcd; none where it has no leader just now
  void break_etcd(const char* kind, std::uint64_t step, const std::vector<std::size_t>& members, bool kill);
  Result<> react(const Event& event);

  const Settings& s_;
  const Plan plan_;
  Job job_;
  Story story_;
  std::set<RankName> paused_;
  bool coordinator_killed_ = false, daemon_killed_ = false, source_killed_ = false, joiner_killed_ = false;
  bool coordinator_paused_ = false, all_paused_ = false, has_started_ = false;
  std::set<std::string> lead_broken_;
  std::int64_t lead_broken_at_ = 0;
  std::deque<std::pair<TimePoint, std::function<Result<>()>>> later_;  // in the order of their times
  nlohmann::json stores_ = nlohmann::json::object();  // the statuses of several coordinators, at the end
};

}  // namespace rejoin::demo
