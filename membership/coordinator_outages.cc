// Who is out of the job, since when and why, and what else is not as it should be: for people.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "membership/coordinator.h"
#include "membership/greeting.h"

namespace rejoin::membership {

namespace {

constexpr auto kNotBackBefore = "it did not come back after the coordinator's restart";  // as older releases wrote it

// No process of it is known to have ended, and it may be that none has.
bool is_unreached(const std::string& why) {
  return why == Coordinator::kNotBack || why == kNotBackBefore || why == "it is silent" || why == "it was silent" ||
         why.ends_with(" is not connected");
}

}  // namespace

// With each epoch, when it is begun or replayed.
void Coordinator::note_outages(const proto::LogRecord::EpochBegun& begun, std::optional<TimePoint> since) {
  std::set<std::uint32_t> in;
  for (const auto& m : begun.members()) in.insert(m.replica());
  std::erase_if(out_, [&](const auto& one) { return in.contains(one.first.value); });
  for (const auto& m : begun.members())
    if (!m.catching_up()) differed_at_start_.erase(ReplicaId(m.replica()));  // it has taken over the others' state
  for (std::uint32_t number = 0; number < config_.replicas; ++number) {
    const ReplicaId id(number);
    if (in.contains(number) || out_.contains(id)) continue;
    const std::string of_its_own = fmt::format("without replica {}: ", id);
    SuspendedReplica* suspended = out_for_now(id);
    std::string why = begun.reason();
    if (suspended != nullptr && !suspended->reason.empty()) why = suspended->reason;
    else if (begun.reason() == "start") why = "it had not come when the job started";
    else if (begun.reason().starts_with(of_its_own)) why = begun.reason().substr(of_its_own.size());
    else if (in.empty()) why = fmt::format("nobody was left to catch up from ({})", begun.reason());
    if (suspended != nullptr && suspended->reason.empty())  // in the log it has none of its own
      suspended->reason = why = begun.reason().starts_with(of_its_own) && why != "silent" ? why : "it was silent";
    out_[id] = {std::move(why), since};
  }
}

// With what is known of the way to it. Its other ranks hear this, too.
std::string Coordinator::why_silent(const ReplicaState& replica) const {
  for (std::size_t number = 0; number < replica.ranks.size(); ++number) {
    const RankState& rank = replica.ranks[number];
    if (!rank.registered || rank.connected_node || may_come_back(rank) || rank.lost_why.empty()) continue;
    const std::string node = node_name(rank);
    std::string whose = config_.ranks == 1 ? "" : fmt::format("rank {}", number);
    if (config_.ranks > 1 && rank.lost_why.find("its node " + node) == std::string::npos)
      whose += fmt::format(" (process {} on node {})", rank.pid, node);
    return fmt::format("it is silent: {}{}{}", whose, whose.empty() ? "" : ": ", rank.lost_why);
  }
  return "it is silent";
}

std::string Coordinator::reason_for_being_out(ReplicaId id) const {
  const auto out = out_.find(id);
  return out == out_.end() ? "its place, or that of another rank of its replica, was given to a new process since"
                           : fmt::format("the others went on without it ({})", out->second.why);
}

std::vector<ReplicaOutage> Coordinator::outages(TimePoint now) const {
  std::vector<ReplicaOutage> all;
  Ring with_it = ring_of_members(When::now);  // and, in the last place, the one that is asked about
  with_it.emplace_back();
  const auto connects = [&](ReplicaId id, const ReplicaState& replica) {
    with_it.back() = {id, replica.incarnation, true};
    return !linked(replica, links_in(links_, with_it, with_it.size() - 1));
  };
  const auto next_of = [&](ReplicaId id) -> std::string {
    if (const auto refused = declarations_.refused().find(id); refused != declarations_.refused().end())
      return fmt::format("its rank {} was refused: {}", refused->second.first, refused->second.second);
    const auto found = replicas_.find(id);
    if (found == replicas_.end())
      return is_unreached(out_.at(id).why)
                 ? "its daemon has to reach this coordinator (see that it runs, and has all coordinators in "
                   "--connect), and then its trainers have to be started again"
                 : "its trainers have to be started again";
    const ReplicaState& replica = found->second;
    const bool suspended = std::ranges::any_of(
        suspended_, [&](const auto& one) { return one.replica == id && one.incarnation == replica.incarnation; });
    if (suspended) return fmt::format("it may be taken back until step {} is committed", committed_.value + 1);
    if (!fully_registered(replica))
      return fmt::format("{} of its {} ranks have registered again, {}", replica.registered, config_.ranks,
                         missing_ranks(replica));
    if (members_.empty()) return "it has registered, and waits for the others";
    if (const auto until = readmissions_.until(id, now))
      return fmt::format(
          "it has registered, and is admitted again in {:.0f} s at the earliest: it was put out soon after "
          "its last admissions",
          seconds(*until - now));
    if (connects(id, replica)) return "it has registered, and connects with the others";
    return fmt::format("it has registered, and is admitted after step {}", committed_.value + 1);
  };
  for (const auto& [id, out] : out_) {
    auto& one = all.emplace_back(ReplicaOutage{.replica = id, .why = out.why, .lasting = {}, .next = {}});
    if (out.since) one.lasting = now - *out.since;
    if (!finished()) one.next = next_of(id);
  }
  return all;
}

// Its daemon uses another transport than that of the first other replica: the two can't catch up from each other.
std::string Coordinator::strange_stream(ReplicaId id, std::uint32_t number) const {
  const auto stream_family = [](const RankState& of) {
    const std::string_view address = of.texts.at(RankText::stream_address);
    return address.substr(0, address.find('='));
  };
  const RankState& rank = replicas_.at(id).ranks[number];
  if (rank.texts.at(RankText::stream_address).empty()) return {};
  const std::string_view family = stream_family(rank);
  for (const auto& [other, replica] : replicas_) {
    if (other == id || replica.ranks.size() <= number || !replica.ranks[number].registered) continue;
    const RankState& its = replica.ranks[number];
    if (its.texts.at(RankText::stream_address).empty()) continue;
    if (stream_family(its) == family) return {};
    return fmt::format(
        "replica {} rank {}: its daemon's catch-up stream goes over {}, and that of replica {} over {}: neither can "
        "catch up from the other. Start all daemons of a job with the same --transport",
        id, number, family, other, stream_family(its));
  }
  return {};
}

// Whose initial states, or checkpoints, are not those that the job goes on from.
void Coordinator::tell_who_differs(const std::vector<ReplicaId>& replicas, const std::vector<ReplicaId>& chosen) {
  differed_at_start_.clear();
  const auto& right = replicas_.at(chosen.front()).ranks;
  for (auto id : replicas) {
    if (std::ranges::find(chosen, id) != chosen.end()) continue;
    const auto& its = replicas_.at(id).ranks;
    RankSet differing;
    bool older = false;
    for (std::uint32_t number = 0; number < its.size(); ++number) {
      older = older || its[number].version != right[number].version;
      if (its[number].digest != right[number].digest) differing.add(RankSet(number));
    }
    const auto [came, last] = versions(replicas_.at(id));
    if (came == last && came > committed_ && steps_rolled_back_ == 0) {
      differed_at_start_[id] = fmt::format(
          "replica {} has come with the state of step {}, and catches up from step {}, the last that is committed, "
          "although nothing was ever rolled back: the log is an older copy, or that state is another job's. To go on "
          "from step {} end the job before its checkpoint is gone, and put the whole log back, or start with a new "
          "--log-directory, or all of several coordinators with a new --job",
          id, came, committed_, came);
      warn("{}", differed_at_start_[id]);
      continue;
    }
    if (older) {
      note("replica {} has come with the state of step {}, and catches up", id, its.front().version);
      continue;
    }
    if (differing.empty()) continue;
    differed_at_start_[id] = fmt::format(
        "replica {} has come with another state of step {} than replica{} {} (on rank{} {}): it takes over theirs. "
        "Give all replicas the same initial weights, or the same checkpoint",
        id, right.front().version, chosen.size() == 1 ? "" : "s", fmt::join(chosen, ", "),
        differing.size() == 1 ? "" : "s", differing.text());
    warn("{}", differed_at_start_[id]);
  }
}

std::vector<std::string> Coordinator::alarms() const {
  std::vector<std::string> all;
  for (const auto& [id, line] : differed_at_start_) all.push_back(line);
  if (runs())  // otherwise the job waits for them
    for (const auto& [place, stranger] : strangers_) all.push_back(stranger.what);
  for (const auto& [id, node] : nodes_)
    if (auto line = different_silence(fmt::format("node {} at {}", printable(node.name, kLongestRelease), node.address),
                                      node.silence_ms, "the coordinator", in_ms(config_.silence)))
      all.push_back(std::move(*line));
  for (const auto& [id, replica] : replicas_) {
    if (id == replicas_.begin()->first) continue;  // the others are compared with it
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number) {
      if (!replica.ranks[number].registered) continue;
      if (auto line = strange_stream(id, number); !line.empty()) {
        all.push_back(std::move(line));
        break;
      }
    }
  }
  const auto is_located = [&](const MemberState& m) { return located(m.replica, m.incarnation).has_value(); };
  const auto without = std::ranges::find_if_not(members_, is_located);
  if (without != members_.end() && !recovering_until_ && std::ranges::any_of(members_, is_located))
    all.push_back(
        fmt::format("replica {} does not say on all of its ranks where it is, and others do: the ring's order does not "
                    "follow locations before all nodes have --location",
                    without->replica));
  return all;
}

}  // namespace rejoin::membership
