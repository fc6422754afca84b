// Telling people what is being waited for.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

std::string missing_ranks(const ReplicaState& replica) {
  RankSet missing;
  for (std::uint32_t rank = 0; rank < replica.ranks.size(); ++rank)
    if (!replica.ranks[rank].registered) missing.add(RankSet(rank));
  const bool one = missing.size() == 1;
  return fmt::format("rank{} {} {} not", one ? "" : "s", shortened(missing.text(), 80), one ? "has" : "have");
}

std::vector<std::string> Coordinator::waiting_for(TimePoint now) const {
  std::vector<std::string> lines = strangers();
  if (outdated_) return {"the whole log: " + *outdated_};
  if (finished()) return {};
  list_claims(now, lines);
  if (stopped_) return {"an operator's decision about replicas that differ"};
  if (!started() || members_.empty()) {
    std::vector<ReplicaId> there;
    for (std::uint32_t r = 0; r < config_.replicas; ++r) {
      auto found = replicas_.find(ReplicaId(r));
      const std::uint32_t up = found == replicas_.end() ? 0 : found->second.registered;
      if (up == config_.ranks) {
        there.push_back(ReplicaId(r));
        continue;
      }
      std::string more;
      if (const auto refused = declarations_.refused().find(ReplicaId(r)); refused != declarations_.refused().end())
        more = fmt::format("; rank {} was refused: {}", refused->second.first, refused->second.second);
      else if (up > 0) more = ", " + missing_ranks(found->second);
      lines.push_back(fmt::format("replica {}: {} of {} ranks have registered{}", r, up, config_.ranks, more));
    }
    for (auto& line : declarations_.dissent_lines(replicas_)) lines.push_back(std::move(line));
    for (auto id : there)
      for (auto& line : unreached_lines(id, replicas_.at(id))) lines.push_back(std::move(line));
    const auto from = newest(there);
    if (from && *from < committed_ && may_roll_back() && *from >= roll_back_to_->to)
      lines.push_back(goes_back_to(*from, now));
    else if (from && *from < committed_)
      lines.push_back("a later checkpoint, or an operator's word: " + rollback_needed(*from));
    for (auto& why : unfit(there)) lines.push_back(std::move(why));
    return lines;
  }
  if (const auto held = blocked_on(); held.size() == 1)
    lines.push_back(
        fmt::format("replica {}: it is silent, and nobody else has the state of step {}", held.front(), committed_));
  else if (!held.empty())
    lines.push_back(fmt::format("replicas {}: they are silent, and nobody else has the state of step {}",
                                fmt::join(held, ", "), committed_));
  list_missing(now, lines);
  for (const auto& [id, replica] : replicas_) {
    const auto is_it = [own = id](const auto& one) { return one.replica == own; };
    if (!fully_registered(replica) || std::ranges::any_of(members_, is_it) || std::ranges::any_of(suspended_, is_it))
      continue;
    for (auto& line : unreached_lines(id, replica)) lines.push_back(std::move(line));
  }
  return lines;
}

// An operator has given the word.
std::string Coordinator::goes_back_to(Step from, TimePoint now) const {
  const std::string goes_on =
      fmt::format("--roll-back-to {} is given: the job goes on from step {} when all replicas have come",
                  roll_back_to_->text(), from);
  if (!incomplete_since_) return goes_on;
  return fmt::format("{}, or without those that have not, in {:.0f} s", goes_on,
                     seconds(std::max(Duration{}, *incomplete_since_ + start_patience() - now)));
}

// What keeps a job from starting is told to its trainers, too, when it has lasted: who started them looks there.
bool Coordinator::runs() const {
  return std::any_of(members_.begin(), members_.end(), [&](const MemberState& m) { return contributes_here(m); });
}

void Coordinator::tell_why_it_waits() {
  std::vector<std::string> lines;
  if (outdated_ || !started() || members_.empty()) lines = waiting_for(now_);
  else tell_incomplete_replicas();
  constexpr std::size_t most = 8;
  if (lines.size() > most) lines.resize(most);
  const auto why = fmt::format("{}", fmt::join(lines, "; "));
  if (why.empty()) {
    waits_ = {};
    return;
  }
  if (auto known = without_times(why); known != waits_.why) {
    waits_.why = std::move(known);
    waits_.since = now_;
    for (const auto& [node, state] : nodes_) waits_.untold.try_emplace(node, now_);
  }
  // What is only about to come needs no line; but of replicas that come and go the line may never stay the same.
  const bool lasts = now_ - waits_.since >= 2 * config_.silence;
  std::vector<NodeId> to;
  std::erase_if(waits_.untold, [&](const auto& one) {
    const Duration untold = now_ - one.second;
    if (untold < (lasts ? 2 : 8) * config_.silence) return false;
    to.push_back(one.first);
    return true;
  });
  if (to.empty()) return;
  proto::ToNode message;
  message.mutable_waits()->set_why(why);
  send_to(std::move(to), std::move(message));
}

// Those of its ranks that have come back, while the job runs.
void Coordinator::tell_incomplete_replicas() {
  for (auto& [id, replica] : replicas_) {
    if (fully_registered(replica)) {
      replica.incomplete = {};
      continue;
    }
    auto& [since, registered, told] = replica.incomplete;
    if (registered != replica.registered) replica.incomplete = {.since = now_, .registered = replica.registered};
    if (told || now_ - since < 2 * config_.silence) continue;
    std::set<NodeId> nodes;
    for (const auto& rank : replica.ranks)
      if (rank.registered && rank.connected_node) nodes.insert(rank.node);
    if (nodes.empty()) continue;
    told = true;
    proto::ToNode message;
    message.mutable_waits()->set_why(
        fmt::format("nobody and goes on; replica {} is taken in when all of its {} ranks have registered: {}", id,
                    config_.ranks, missing_ranks(replica)));
    send_to({nodes.begin(), nodes.end()}, std::move(message));
  }
}

// With whom it can't connect, so that it can't start, or be admitted.
std::vector<std::string> Coordinator::unreached_lines(ReplicaId id, const ReplicaState& replica) const {
  std::vector<std::string> lines;
  for (const auto& status : replica.statuses.current())
    for (const auto& one : status.unreached)
      if (registration(ReplicaId(one.replica()), Incarnation(one.incarnation())) != nullptr)
        lines.push_back(fmt::format("replica {} rank {}: it can't connect with replica {} rank {}: {}", id, one.rank(),
                                    one.replica(), one.rank(), one.why()));
  return lines;
}

// Of those who have yet to reduce the step, most wait for others themselves as a rule: a ring stands when one of it
// does. Who is really waited for is whoever waits for nobody.
void Coordinator::list_missing(TimePoint now, std::vector<std::string>& lines) const {
  std::set<ReplicaId> waiting;
  for (const auto& [edge, about] : accusations_)
    if (edge.from != edge.to) waiting.insert(edge.from);
  const auto is_cause = [&](const MemberState& m) {
    return m.reduced.size() < config_.ranks && !waiting.contains(m.replica);
  };
  const bool known = std::any_of(members_.begin(), members_.end(), is_cause);
  for (const auto& m : members_)
    if (known ? is_cause(m) : m.reduced.size() < config_.ranks) lines.push_back(missing_line(m, now));
}

std::string Coordinator::missing_line(const MemberState& m, TimePoint now) const {
  RankSet missing, waited_for;
  missing.add(0, config_.ranks);
  missing.remove(m.reduced);
  TimePoint since = under_way_since_;
  std::string why;
  for (const auto& [edge, about] : accusations_) {
    if (edge.to != m.replica) continue;
    waited_for.add(about.ranks.common(missing));
    if (why.empty()) since = about.waits_since;
    since = std::min(since, about.waits_since);
    why += edge.from == edge.to
               ? fmt::format("; the step waits for {}", about.what)
               : fmt::format("; replica {} {}: {}", edge.from, about.lost ? "has lost it" : "waits for it", about.what);
  }
  if (!waited_for.empty()) missing = waited_for;
  if (const ReplicaState* here = registration(m.replica, m.incarnation))
    for (std::uint32_t number = 0; number < here->ranks.size(); ++number)
      if (const RankState& rank = here->ranks[number]; rank.registered && !rank.connected_node) {
        why += fmt::format("; rank {} has not been heard for {:.0f} ms: {}", number, milliseconds(now - rank.lost_at),
                           rank.lost_why);
        break;
      }
  return fmt::format("replica {} rank{} {}: its reduction of step {}, for {:.0f} ms{}", m.replica,
                     missing.size() == 1 ? "" : "s", missing.text(), committed_.value + 1, milliseconds(now - since),
                     why);
}

}  // namespace rejoin::membership
