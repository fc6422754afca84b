#include "examples/demo_run.h"

#include <signal.h>

#include <thread>

#include "base/fail.h"
#include "examples/demo_view.h"
#include "examples/interrupt.h"

namespace rejoin::demo {

namespace {

std::int64_t now_ns() { return SteadyClock().now().time_since_epoch().count(); }

}  // namespace

Result<> Run::go() {
  LiveView view(s_.job, s_.quiet);
  if (auto started = job_.start(trainers_arguments()); !started) return started;
  has_started_ = true;
  if (!s_.quiet) std::printf("the page is at %s\n", job_.pages().c_str());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(s_.limit_seconds);
  while (!job_.finished()) {
    if (auto on = unless_interrupted(); !on) return on;
    if (std::chrono::steady_clock::now() > deadline) {
      std::string tail;
      for (const auto& line : job_.output_tail()) tail += "\n  " + line;
      return fail(ErrorCode::timeout, "the run did not end within {} s; it is at step {}.{}", s_.limit_seconds,
                  story_.committed(), tail);
    }
    story_.name(job_.coordinators());
    for (const auto& event : story_.read())
      if (auto reacted = react(event); !reacted) return reacted;
    if (auto looked = job_.look_after(SteadyClock().now()); !looked) return looked;
    if (auto mended = mend(SteadyClock().now()); !mended) return mended;
    view.draw(story_);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (auto mended = mend(TimePoint::max()); !mended) return mended;
  auto statuses = job_.settle();
  if (!statuses) return tl::unexpected(statuses.error());
  stores_ = std::move(*statuses);
  story_.name(job_.coordinators());
  story_.read();
  view.draw(story_);
  view.end();
  return {};
}

std::string Run::left_out() const {
  std::string all;
  const auto add = [&](const char* flag, bool planned, bool done, const char* why) {
    if (planned && !done) all += fmt::format("{} did not come about: {} before the last step\n", flag, why);
  };
  add("--kill-source", s_.kill_source, source_killed_, "nobody caught up from it");
  add("--kill-joiner", s_.kill_joiner, joiner_killed_, "nobody caught up");
  for (const auto& [flag, kind, step] : s_.of_lead())
    add(flag, step != 0, lead_broken_.contains(kind), "there was no such leader");
  return all;
}

nlohmann::json Run::report() const {
  auto report = story_.report(s_.job, job_.log_paths());
  for (const auto& [name, status] : stores_.items()) {
    auto write = status.at("store").at("write_us");
    write["who"] = name;
    if (!report.contains("write_us") || write.at("count") > report.at("write_us").at("count"))
      report["write_us"] = std::move(write);
  }
  return report;
}

std::map<RankName, std::vector<std::string>> Run::trainers_arguments() const {
  std::map<RankName, std::vector<std::string>> more;
  const auto add = [&](RankName rank, const char* option, std::uint64_t step) {
    more[rank].insert(more[rank].end(), {option, std::to_string(step)});
  };
  for (const auto& [target, kind] : plan_.ranks) add(target.rank, "--pause-at", target.step);
  if (plan_.drift) add(plan_.drift->rank, "--drift-from", plan_.drift->step);
  if (s_.flip_bit != 0) add({s_.job.replicas - 1, 0}, "--flip-bit-at", s_.flip_bit);
  return more;
}

void Run::pause(const char* kind, std::uint64_t step) {
  story_.did({now_ns(), kind, 0, 0, step});
  if (kind == std::string("pause_all")) job_.signal_all(SIGSTOP);
  else job_.signal_coordinator(SIGSTOP);
  later([this]() -> Result<> {
    job_.signal_all(SIGCONT);
    return {};
  });
}

void Run::later(std::function<Result<>()> what) {
  later_.emplace_back(SteadyClock().now() + std::chrono::milliseconds(s_.pause_ms), std::move(what));
}

Result<> Run::mend(TimePoint now) {
  while (!later_.empty() && later_.front().first <= now) {
    auto mended = later_.front().second();
    later_.pop_front();
    if (!mended) return mended;
  }
  return {};
}

Result<> Run::break_lead(const Event& commit) {
  const std::uint64_t step = commit.number("step") + 1;
  if (commit.t < lead_broken_at_) return {};  // by one that may lead no more
  for (const auto& [flag, kind, at] : s_.of_lead()) {
    if (at == 0 || step < at || lead_broken_.contains(kind)) continue;
    const bool of_etcd = std::string_view(kind).ends_with("etcd"), kill = std::string_view(kind).starts_with("kill");
    const auto members = of_etcd ? members_to_break() : std::vector<std::size_t>{};
    if (of_etcd && members.empty()) return {};  // it has no leader right now
    lead_broken_.insert(kind);
    lead_broken_at_ = now_ns();
    if (of_etcd) break_etcd(kind, step, members, kill);
    else break_leader(kind, step, commit.who, kill);
    return {};
  }
  return {};
}

void Run::break_leader(const char* kind, std::uint64_t step, const std::string& who, bool kill) {
  story_.did({now_ns(), kind, 0, 0, step, who});
  job_.signal_coordinator(kill ? SIGKILL : SIGSTOP, who);
  if (kill) return;  // it is started again as whoever is killed is
  later([this, kind, who]() -> Result<> {
    story_.undone(kind, now_ns());
    job_.signal_coordinator(SIGCONT, who);
    return {};
  });
}

std::vector<std::size_t> Run::members_to_break() {
  const auto leader = job_.etcd()->leader();
  std::vector<std::size_t> members;
  for (std::size_t i = 0; leader && i < Etcd::kMembers; ++i)
    if (s_.etcd_members == "all" || (s_.etcd_members == "leader") == (i == *leader)) members.push_back(i);
  if (s_.etcd_members == "follower" && leader) members.resize(1);
  return members;
}

void Run::break_etcd(const char* kind, std::uint64_t step, const std::vector<std::size_t>& members, bool kill) {
  std::string who = s_.etcd_members == "all" ? "all of etcd" : Etcd::name(members.front());
  if (s_.etcd_members == "leader") who += ", which led etcd";
  story_.did({now_ns(), kind, 0, 0, step, who});
  for (auto member : members)
    if (kill) job_.etcd()->kill(member);
    else job_.etcd()->signal(member, SIGSTOP);
  later([this, kind, members, kill]() -> Result<> {
    story_.undone(kind, now_ns());
    for (auto member : members) {
      if (!kill) job_.etcd()->signal(member, SIGCONT);
      else if (auto started = job_.etcd()->restart(member); !started) return started;
    }
    return {};
  });
}

Result<> Run::react(const Event& event) {
  RankName rank;
  const bool trainer = std::sscanf(event.who.c_str(), "r%u.%u", &rank.replica, &rank.rank) == 2;
  const std::uint64_t step = event.number("step");
  if (trainer && event.kind == "paused") {
    paused_.insert(rank);
    // Those of one step die together.
    std::vector<std::pair<Target, std::string>> together;
    for (const auto& target : plan_.ranks)
      if (target.first.step == step) together.push_back(target);
    for (const auto& [target, kind] : together)
      if (!paused_.contains(target.rank)) return {};
    for (const auto& [target, kind] : together) {
      story_.did({now_ns(), kind, target.rank.replica, target.rank.rank, step});
      job_.signal_trainer(target.rank, kind == "hang" ? SIGSTOP : SIGKILL);
    }
  }
  if (event.kind == "commit")
    if (auto broken = break_lead(event); !broken) return broken;
  if (event.kind == "commit" && s_.kill_coordinator != 0 && !coordinator_killed_ && step + 1 >= s_.kill_coordinator) {
    coordinator_killed_ = true;
    story_.did({now_ns(), "kill_coordinator", 0, 0, step + 1});
    return job_.restart_coordinator();
  }
  if (event.kind == "commit" && s_.pause_coordinator != 0 && !coordinator_paused_ && step + 1 >= s_.pause_coordinator) {
    coordinator_paused_ = true;
    pause("pause_coordinator", step + 1);
  }
  if (event.kind == "commit" && s_.pause_all != 0 && !all_paused_ && step + 1 >= s_.pause_all) {
    all_paused_ = true;
    pause("pause_all", step + 1);
  }
  if (event.kind == "commit" && plan_.daemon && !daemon_killed_ && step + 1 >= plan_.daemon->step) {
    daemon_killed_ = true;
    story_.did({now_ns(), "kill_daemon", plan_.daemon->rank.replica, 0, step + 1});
    return job_.restart_daemon(plan_.daemon->rank.replica);
  }
  if (event.kind == "stopped")
    return fail(ErrorCode::unavailable, "the job has stopped at step {}, and waits for an operator: {}", step,
                event.fields.value("reason", ""));
  if (event.kind == "rank_down") job_.end_stopped(static_cast<std::uint32_t>(event.number("replica")));
  // As soon as the stream of a joiner has begun, one of its sources dies.
  if (s_.kill_source && !source_killed_ && event.kind == "catch_up" && event.number("bytes") > 0 &&
      !event.fields.value("done", false))
    for (const auto& [id, replica] : story_.replicas())
      if (replica.role == "contributor" && id != event.number("replica")) {
        source_killed_ = true;
        const RankName source{id, static_cast<std::uint32_t>(event.number("rank"))};
        story_.did({now_ns(), "kill_source", source.replica, source.rank, story_.committed() + 1});
        job_.signal_trainer(source, SIGKILL);
        break;
      }
  if (s_.kill_joiner && !joiner_killed_ && event.kind == "catch_up" && event.number("bytes") > 0 &&
      !event.fields.value("done", false)) {
    joiner_killed_ = true;
    const RankName joiner{static_cast<std::uint32_t>(event.number("replica")),
                          static_cast<std::uint32_t>(event.number("rank"))};
    story_.did({now_ns(), "kill_joiner", joiner.replica, joiner.rank, story_.committed() + 1});
    job_.signal_trainer(joiner, SIGKILL);
  }
  return {};
}

}  // namespace rejoin::demo
