// Two processes for one place. Who has it keeps it for as long as it lives and answers; whoever else asks for it waits
// until that is known: an answer of the first one's daemon (refused), its end, or its silence for too long (taken).
// After this coordinator's restart who had it by the log has its time to come back. Time in which this coordinator did
// not run is nobody's silence here either, though what the second one says may be the first that it reads then.
#include <fmt/format.h>

#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

// Another process has the place and may be alive, for all that this coordinator has heard. A daemon has one process in
// a place, so that of the same daemon has ended.
RankState* Coordinator::holder_against(const proto::RankUp& up) {
  auto found = replicas_.find(ReplicaId(up.replica()));
  if (found == replicas_.end() || found->second.ranks.empty()) return nullptr;
  RankState& rank = found->second.ranks[up.rank()];
  if (!rank.registered || rank.instance == up.instance() || rank.daemon == up.daemon()) return nullptr;
  const bool may_be_there = rank.connected_node || may_come_back(rank) || pause_detector_.just_paused(now_);
  return may_be_there ? &rank : nullptr;
}

// Somebody else had the place when this coordinator started, and may yet come back: it may have the only copy of the
// state.
bool Coordinator::former_may_come_back(const proto::RankUp& up, TimePoint now) const {
  if (!recovering_until_ || (now >= *recovering_until_ && !pause_detector_.just_paused(now))) return false;
  const ReplicaId id(up.replica());
  const auto is_its = [&](const auto& one) { return one.replica == id; };
  const MemberState* m = members_.find(id);
  const auto out = std::find_if(suspended_.begin(), suspended_.end(), is_its);
  if (m == nullptr && (out == suspended_.end() || out->ended)) return false;
  const Incarnation its = m != nullptr ? m->incarnation : out->incarnation;
  const auto found = replicas_.find(id);
  if (found == replicas_.end()) return true;
  return found->second.incarnation == its && !found->second.ranks.empty() && !found->second.ranks[up.rank()].registered;
}

// Who asks for a place that another process has, or may yet come back to, waits.
Screened Coordinator::screen_place(NodeId node, const proto::RankUp& up) {
  const auto process = ProcessId::of(up);
  std::erase_if(claims_, [&](const PlaceClaim& one) {
    const bool again = same_process(one.up, up);
    if (const auto before = nodes_.find(one.node); again && one.node != node && before != nodes_.end())
      before->second.moved.push_back(process);
    return again;
  });
  std::erase(nodes_[node].moved, process);
  RankState* holder = holder_against(up);
  if (holder == nullptr && !former_may_come_back(up, now_)) return Screened::goes_on;
  if (too_many(claims_, up)) {
    refuse(node, up, refusals::Why::place, "several processes ask for its place already");
    return Screened::handled;
  }
  PlaceClaim& claim = claims_.emplace_back(PlaceClaim{.node = node, .up = up});
  if (holder == nullptr) return Screened::handled;
  warn("replica {} rank {}: process {} on node {} asks for the place of process {} on node {}", up.replica(), up.rank(),
       up.pid(), up.node(), holder->pid, node_name(*holder));
  actions_.notes.back().like = fmt::format("replica {} rank {} is asked for", up.replica(), up.rank());
  inquire(claim, *holder);
  return Screened::handled;
}

// Whether its process lives. A node answers in order, so that it would have reported its end before.
void Coordinator::inquire(PlaceClaim& claim, const RankState& holder) {
  if (!holder.connected_node || (claim.asked == holder.node && claim.asked_of == holder.instance)) return;
  claim.asked = holder.node;
  claim.asked_of = holder.instance;
  proto::ToNode message;
  auto& inquiry = *message.mutable_inquiry();
  inquiry.set_replica(claim.up.replica());
  inquiry.set_rank(claim.up.rank());
  inquiry.set_instance(holder.instance);
  send(holder.node, std::move(message));
}

void Coordinator::on_alive(const proto::Alive& alive) {
  const RankState* holder = rank_of(ProcessId::of(alive));
  if (holder == nullptr || !holder->connected_node) return;
  std::erase_if(claims_, [&](const PlaceClaim& claim) {
    if (claim.up.replica() != alive.replica() || claim.up.rank() != alive.rank()) return false;
    refuse(
        claim.node, claim.up, refusals::Why::place,
        fmt::format("process {} on node {} is replica {} rank {}, and gave its last sign of life {} ms ago: end that "
                    "process, or give this one another replica or rank",
                    holder->pid, node_name(*holder), alive.replica(), alive.rank(), alive.silent_ms()));
    return true;
  });
}

// Those whose predecessor has ended meanwhile, or is silent for too long, register.
void Coordinator::settle_claims() {
  for (auto& claim : std::exchange(claims_, {})) {
    RankState* holder = finished() ? nullptr : holder_against(claim.up);
    if (holder == nullptr && (finished() || !former_may_come_back(claim.up, now_))) {
      on_rank_up(claim.node, claim.up);
      continue;
    }
    if (holder != nullptr) inquire(claim, *holder);
    claims_.push_back(std::move(claim));
  }
}

std::string Coordinator::node_name(const RankState& rank) { return std::string(rank.texts.at(RankText::node)); }

void Coordinator::list_claims(TimePoint now, std::vector<std::string>& lines) const {
  for (const auto& claim : claims_) {
    const auto found = replicas_.find(ReplicaId(claim.up.replica()));
    if (former_may_come_back(claim.up, now)) {
      lines.push_back(fmt::format(
          "replica {} rank {}: process {} on node {} asks for the place of one that has yet to come back after the "
          "coordinator's restart, and has {:.0f} ms to do so",
          claim.up.replica(), claim.up.rank(), claim.up.pid(), claim.up.node(),
          milliseconds(std::max(Duration{}, *recovering_until_ - now))));
      continue;
    }
    if (found == replicas_.end() || found->second.ranks.empty()) continue;
    const RankState& holder = found->second.ranks[claim.up.rank()];
    lines.push_back(fmt::format(
        "replica {} rank {}: process {} on node {} asks for the place of process {} on node {}, {}", claim.up.replica(),
        claim.up.rank(), claim.up.pid(), claim.up.node(), holder.pid, node_name(holder),
        holder.connected_node ? "which is asked whether it lives"
                              : fmt::format("whose node is gone since {:.0f} ms", milliseconds(now - holder.lost_at))));
  }
}

}  // namespace rejoin::membership
