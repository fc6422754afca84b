// Members that accuse each other: who connects again, who is put out, and for how long.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/text.h"
#include "membership/coordinator.h"
#include "membership/disconnected.h"

namespace rejoin::membership {

namespace {

constexpr int kMends = 3;  // epochs in which two members may try to connect again, for each step

// Then neither of them has died.
bool broke_at_both_ends(const std::map<Edge, Accusation>& accusations, const Edge& edge) {
  const auto lost = [&](const Edge& side) {
    const auto found = accusations.find(side);
    return found != accusations.end() && found->second.lost;
  };
  return lost(edge) && lost({edge.to, edge.from});
}

}  // namespace

void Coordinator::on_accusation(NodeId node, const proto::Accusation& accusation) {
  if (is_of_strangers(node, accusation.replica(), RankSet(accusation.rank()))) return;
  const bool current = accusation.epoch() == epoch_.value &&
                       members_.find(ReplicaId(accusation.replica())) != nullptr &&
                       members_.find(ReplicaId(accusation.suspect())) != nullptr;
  if (!current) return;
  auto [edge, fresh] = accusations_.try_emplace({ReplicaId(accusation.replica()), ReplicaId(accusation.suspect())});
  Accusation& about = edge->second;
  const TimePoint waits_since =
      now_ - std::chrono::milliseconds(std::min<std::uint64_t>(accusation.waited_ms(), 1 << 30));
  about.waits_since = fresh ? waits_since : std::min(about.waits_since, waits_since);
  const RankSet rank = accusation.rank() < config_.ranks ? RankSet(accusation.rank()) : RankSet();
  const bool waits_for_other = !accusation.lost() && accusation.suspect() != accusation.replica();
  about.ranks.add(rank);
  about.heard = now_;
  if (accusation.unconnected()) about.unconnected.add(rank);
  else if (waits_for_other) on_connected(accusations_, ReplicaId(accusation.replica()), rank);
  about.untold |= waits_for_other && !accusation.tells_connections();
  // That it is waited for, once it is lost, tells no more; nor that the other end has closed what one has given up.
  if (explains(accusation.lost(), accusation.found(), accusation.unconnected()) >=
      explains(about.lost, about.found, !about.unconnected.empty()))
    about.what = shortened(accusation.what(), kLongestReason);
  about.lost |= accusation.lost();
  about.found |= accusation.lost() && accusation.found();
  if (!accusation.only_waiting() && !rank.empty()) about.counting.try_emplace(accusation.rank(), now_);
  if (accusation.excused() && accusation.suspect() == accusation.replica()) about.excused = now_;
  if (judges_now() && mended_.empty() && broke_at_both_ends(accusations_, edge->first)) mend();
}

// Two members whose connection broke connect again, in an epoch of the same members, before anyone is judged: at once
// where both say so, which counts as no try. One end may have lost a process that has died, which its daemon reports
// first; and of what breaks again in the same step, or of many that break at a time, the tries would be used up.
bool Coordinator::mend() {
  std::set<Edge> broken;
  std::string what;
  bool at_once = false;
  const bool first = mended_.empty();
  for (const auto& [edge, about] : accusations_) {
    if (!about.lost || !about.counts()) continue;
    const bool due = now_ - about.since() >= config_.silence / 16;
    if (!(due || (first && broke_at_both_ends(accusations_, edge)))) continue;
    const MemberState *one = members_.find(edge.from), *other = members_.find(edge.to);
    if (one == nullptr || other == nullptr || one == other) continue;
    if (!present(one->replica, one->incarnation) || !present(other->replica, other->incarnation)) continue;
    const Edge pair{std::min(edge.from, edge.to), std::max(edge.from, edge.to)};
    if (const auto times = mended_.find(pair); times != mended_.end() && times->second >= kMends) continue;
    broken.insert(pair);
    at_once |= !due;
    if (what.empty() || about.found) what = about.what;
  }
  if (broken.empty()) return false;
  std::string pairs;
  for (const auto& pair : broken) {
    mended_[pair] += at_once ? 0 : 1;
    pairs += fmt::format("{}{} and {}", pairs.empty() ? "" : ", ", pair.from, pair.to);
  }
  next_epoch(fmt::format("replicas {} connect again: {}", pairs, what));
  return true;
}

// That it waits, and for whom: all of its ranks are heard, and not for the first time just now.
bool Coordinator::could_say(const MemberState& m) const {
  const auto hears = [&](const RankState& rank) {
    const auto node = nodes_.find(rank.node);
    return rank.connected_node && node != nodes_.end() && node->second.is_heard_steadily(now_, config_.silence);
  };
  const ReplicaState* here = registration(m.replica, m.incarnation);
  return here != nullptr && fully_registered(*here) && std::ranges::all_of(here->ranks, hears);
}

// The wait-for graph: who is waited for, but waits for nobody, is the one that hangs. Who has been in the job for few
// steps has more patience than others, or has lost its own a moment after them: it says whom it waits for all the same,
// and then that one hangs, if anybody. But where members have no connection with each other, all waits follow from
// that: it is the one that most others have none with, and of two that both have others (Disconnected); unless ranks of
// before wait, who can't say for what. Of one that is not heard it isn't known whether it waits: within a silence it is
// heard again or lost, and as long nobody is judged who does wait.
void Coordinator::judge() {
  const Duration patience = config_.silence / 4;
  std::map<ReplicaId, int> accused;
  std::set<ReplicaId> waiting;
  std::vector<Edge> current;
  for (const auto& [edge, about] : accusations_) {
    // The step waits for a trainer that may take its time, and so all others may.
    if (about.excused && now_ - *about.excused <= config_.silence) return;
    if (edge.from != edge.to && (about.counts() || now_ - about.heard <= patience)) {
      waiting.insert(edge.from);
      current.push_back(edge);
    }
    if (about.counts() && now_ - about.since() >= patience) ++accused[edge.to];
  }
  if (accused.empty()) return;
  for (std::size_t before = 0; before != accused.size();) {
    before = accused.size();
    for (const auto& edge : current)
      if (accused.contains(edge.from)) accused.try_emplace(edge.to, 0);
  }
  const Disconnected disconnected(accusations_, members_, now_, patience);
  if (disconnected.decides() && !disconnected.stands()) return;
  enum class Known : std::uint8_t { waits, nothing, hangs };
  const auto known_of = [&](const MemberState& m) {
    return waiting.contains(m.replica) ? Known::waits : could_say(m) ? Known::hangs : Known::nothing;
  };
  std::tuple<Known, std::tuple<int, int, int>, Known, bool, ReplicaId> worst{};  // less guilty first
  if (disconnected.decides())
    for (const auto& [id, others] : disconnected.all()) {
      const MemberState& m = *members_.find(id);
      const Known known = known_of(m);
      worst = std::max(worst, {known == Known::nothing ? known : Known::waits, disconnected.weight(id, mended_), known,
                               m.catching_up, id});
    }
  else
    for (const auto& [id, times] : accused)
      if (const MemberState* m = members_.find(id))
        worst = std::max(worst, {known_of(*m), {times, disconnected.lacks(id), 0}, Known::waits, m->catching_up, id});
  const ReplicaId guilty = std::get<ReplicaId>(worst);
  const MemberState* m = members_.find(guilty);
  if (m == nullptr) return;
  const Known known = known_of(*m);
  bool for_long = false;
  for (const auto& [edge, about] : accusations_)
    for_long |= edge.to == guilty && about.counts() && now_ - about.since() > patience + config_.silence;
  if (known == Known::nothing && !for_long) return;
  std::string what;
  bool explained = disconnected.decides();  // … or by its own library
  if (explained) what = disconnected.why(guilty);
  else
    for (const auto& [edge, about] : accusations_)
      if (edge.to == guilty && edge.from != guilty && (about.lost || !explained)) {
        what = fmt::format("replica {} {} {}", edge.from, about.lost ? "lost it:" : "waits for", about.what);
        explained |= about.lost;
      }
  if (const auto its_own = accusations_.find({guilty, guilty}); its_own != accusations_.end()) {
    what += fmt::format("{}the step waits for {}", what.empty() ? "" : "; ", its_own->second.what);
    explained = true;
  }
  if (!explained && known == Known::hangs && m->reduced.size() < config_.ranks)
    what =
        fmt::format("it hangs: its processes are heard, wait for nobody and do not go on{}; {}", who_hangs(*m), what);
  // Who was back last has to hear of the step first, in which the others wait for it, and to do it.
  if (std::exchange(nobody_was_heard_, false))
    return next_epoch(fmt::format("all members wait anew, since nobody was heard for a while: {}", what));
  if (m->catching_up && last_complete(*m)) return block_on(guilty, what);
  if (m->catching_up && !caught_up(*m)) return put_out_for_now(guilty, what);
  if (!others_contribute(guilty) && !promote_caught_up(Whom::connected)) return block_on(guilty, what);
  put_out_for_now(guilty, what);
}

// Of the processes of a replica those that have not reduced the step, where others have.
std::string Coordinator::who_hangs(const MemberState& m) const {
  const ReplicaState* here = registration(m.replica, m.incarnation);
  if (m.reduced.empty() || here == nullptr) return {};
  std::string who;
  constexpr std::size_t most = 8;
  std::size_t named = 0;
  for (std::uint32_t number = 0; number < here->ranks.size(); ++number) {
    if (m.reduced.contains(number) || ++named > most) continue;
    const RankState& rank = here->ranks[number];
    who += fmt::format("{}rank {} (process {} on node {})", named == 1 ? "" : ", ", number, rank.pid, node_name(rank));
  }
  return fmt::format("; {}{} {} not reduced the step", who,
                     named > most ? fmt::format(" and {} more", named - most) : "", named == 1 ? "has" : "have");
}

// A member that lives, and whose state, if it has one, is right.
void Coordinator::put_out_for_now(ReplicaId id, const std::string& why) {
  const MemberState& m = *members_.find(id);
  hold_back(id, why);
  if (m.catching_up && !caught_up(m)) return remove(id, why);
  suspend(id, why);
  next_epoch(fmt::format("without replica {}: {}", id, why));
}

// Whoever is put out soon after its admission, again and again, costs all others what it takes to find that out.
void Coordinator::hold_back(ReplicaId id, const std::string& why) {
  const auto held = readmissions_.on_put_out(id, committed_, now_);
  if (!held) return;
  warn("replica {} was put out soon after its admission, {} times ({}): the next is in {:.0f} s at the earliest", id,
       held->times, why, seconds(held->pause));
}

}  // namespace rejoin::membership
