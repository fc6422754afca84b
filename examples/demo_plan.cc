#include "examples/demo_plan.h"

#include <cstdio>
#include <set>
#include <tuple>

#include "base/fail.h"

namespace rejoin::demo {

namespace {

Result<> check_step(const std::string& typed, std::uint64_t step, const JobSettings& job) {
  if (step >= 1 && step < job.steps) return {};
  return fail(ErrorCode::invalid_argument,
              "{} is outside this run of {} replicas × {} ranks and {} steps: a step from 1 to {}", typed, job.replicas,
              job.ranks, job.steps, job.steps - 1);
}

// "1.0@40", or "1@40" where a replica will do.
Result<Target> parse(const char* flag, const std::string& text, bool replica_will_do, const JobSettings& job) {
  const std::string typed = fmt::format("{} {}", flag, text);
  const auto at = text.find('@');
  const bool bare = replica_will_do && at != std::string::npos && text.find('.') == std::string::npos;
  const std::string whole = bare ? fmt::format("{}.0{}", text.substr(0, at), text.substr(at)) : text;
  Target target;
  int used = 0;
  if (std::sscanf(whole.c_str(), "%u.%u@%lu%n", &target.rank.replica, &target.rank.rank, &target.step, &used) != 3 ||
      used != static_cast<int>(whole.size()))
    return fail(ErrorCode::invalid_argument, "{} is not of the form {}, e.g. {}", typed,
                replica_will_do ? "REPLICA@STEP" : "REPLICA.RANK@STEP", replica_will_do ? "1@40" : "1.0@40");
  if (target.rank.replica >= job.replicas || target.rank.rank >= job.ranks)
    return fail(ErrorCode::invalid_argument,
                "{} is outside this run of {} replicas × {} ranks and {} steps: a replica from 0 to {}, a rank from 0 "
                "to {}",
                typed, job.replicas, job.ranks, job.steps, job.replicas - 1, job.ranks - 1);
  if (auto right = check_step(typed, target.step, job); !right) return tl::unexpected(right.error());
  return target;
}

// A replica whose rank has ended comes back as a whole, in processes that nothing is planned for.
Result<> add(Plan& plan, const std::string& kind, const std::string& text, const JobSettings& job) {
  const std::string flag = fmt::format("--{}", kind);
  const auto target = parse(flag.c_str(), text, false, job);
  if (!target) return tl::unexpected(target.error());
  for (const auto& [before, its_kind] : plan.ranks)
    if (before.rank.replica == target->rank.replica && (before.rank == target->rank || before.step != target->step))
      return fail(ErrorCode::invalid_argument,
                  "{} {}: --{} {}.{}@{} ends replica {} already; one such fault for each replica, or several of its "
                  "ranks in one step",
                  flag, text, its_kind, before.rank.replica, before.rank.rank, before.step, before.rank.replica);
  plan.ranks.emplace_back(*target, kind);
  return {};
}

// What --no-kill contradicts; nothing where nothing of it was given.
std::string kills_of(const Faults& faults) {
  if (!faults.kills.empty()) return fmt::format("--kill {}", faults.kills.front());
  if (!faults.hangs.empty()) return fmt::format("--hang {}", faults.hangs.front());
  if (!faults.kill_daemon.empty()) return fmt::format("--kill-daemon {}", faults.kill_daemon);
  if (faults.kill_coordinator != 0) return fmt::format("--kill-coordinator {}", faults.kill_coordinator);
  if (faults.kill_leader != 0) return fmt::format("--kill-leader {}", faults.kill_leader);
  if (faults.kill_etcd != 0) return fmt::format("--kill-etcd {}", faults.kill_etcd);
  return faults.kill_source ? "--kill-source" : faults.kill_joiner ? "--kill-joiner" : "";
}

// What there is one of, or several.
Result<> check_store(const Faults& faults, const JobSettings& job) {
  for (const auto& [flag, kind, step] : faults.of_lead())
    if (step != 0 && !job.several())
      return fail(ErrorCode::invalid_argument, "{} {}: there is one coordinator, and no etcd; give --store etcd, too",
                  flag, step);
  for (const auto& [flag, step, other] : {std::tuple("--kill-coordinator", faults.kill_coordinator, "--kill-leader"),
                                          {"--pause-coordinator", faults.pause_coordinator, "--pause-leader"}})
    if (step != 0 && job.several())
      return fail(ErrorCode::invalid_argument, "{} {}: with --store etcd there are several; give {} {}", flag, step,
                  other, step);
  return {};
}

}  // namespace

std::array<Faults::OfLead, 4> Faults::of_lead() const {
  return {{{"--kill-leader", "kill_leader", kill_leader},
           {"--pause-leader", "pause_leader", pause_leader},
           {"--kill-etcd", "kill_etcd", kill_etcd},
           {"--pause-etcd", "pause_etcd", pause_etcd}}};
}

bool Faults::none() const {
  return kills.empty() && hangs.empty() && kill_daemon.empty() && drift.empty() &&
         kill_coordinator + pause_coordinator + pause_all + flip_bit == 0 &&
         kill_leader + pause_leader + kill_etcd + pause_etcd == 0;
}

bool Faults::lose_all(const JobSettings& job) const {
  std::set<std::string> replicas;
  for (const auto& list : {kills, hangs})
    for (const auto& text : list) replicas.insert(text.substr(0, text.find('.')));
  return replicas.size() == job.replicas;
}

Result<Plan> plan_of(const Faults& faults, const JobSettings& job) {
  if (const std::string kill = kills_of(faults); faults.no_kill && !kill.empty())
    return fail(ErrorCode::invalid_argument, "--no-kill and {}: nothing is killed, or that is; give one of them", kill);
  if (auto right = check_store(faults, job); !right) return tl::unexpected(right.error());
  Plan plan;
  for (const auto& text : faults.kills)
    if (auto added = add(plan, "kill", text, job); !added) return tl::unexpected(added.error());
  for (const auto& text : faults.hangs)
    if (auto added = add(plan, "hang", text, job); !added) return tl::unexpected(added.error());
  for (const auto& [flag, text, target] :
       {std::tuple("--kill-daemon", &faults.kill_daemon, &plan.daemon), {"--drift", &faults.drift, &plan.drift}}) {
    if (text->empty()) continue;
    const auto parsed = parse(flag, *text, true, job);
    if (!parsed) return tl::unexpected(parsed.error());
    *target = *parsed;
  }
  std::vector<std::pair<const char*, std::uint64_t>> steps{{"--kill-coordinator", faults.kill_coordinator},
                                                           {"--pause-coordinator", faults.pause_coordinator},
                                                           {"--pause-all", faults.pause_all},
                                                           {"--flip-bit", faults.flip_bit}};
  for (const auto& one : faults.of_lead()) steps.emplace_back(one.flag, one.step);
  for (const auto& [flag, step] : steps)
    if (step != 0)
      if (auto right = check_step(fmt::format("{} {}", flag, step), step, job); !right)
        return tl::unexpected(right.error());
  // Of two that differ nobody can say which is wrong: the job would stop, and wait for an operator.
  if (plan.drift && job.replicas < 3)
    return fail(ErrorCode::invalid_argument,
                "--drift {}: it takes three replicas to say which one differs; give --replicas 3, or more",
                faults.drift);
  if (faults.flip_bit != 0 && job.replicas < 2)
    return fail(ErrorCode::invalid_argument,
                "--flip-bit {}: one replica has nobody to compare its results with; give --replicas 2, or more",
                faults.flip_bit);
  if ((faults.kill_source || faults.kill_joiner) && plan.ranks.empty() && !plan.drift)
    return fail(ErrorCode::invalid_argument, "{}: nobody catches up in this run; give --kill REPLICA.RANK@STEP, too",
                faults.kill_source ? "--kill-source" : "--kill-joiner");
  return plan;
}

}  // namespace rejoin::demo
