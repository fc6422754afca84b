// Who is there: ranks register, come back, and get their peers' addresses.
#include <fmt/format.h>

#include <algorithm>

#include "base/location.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

void Coordinator::on_rank_up(NodeId node, const proto::RankUp& up) {
  waits_.untold.try_emplace(node, now_);
  if (screen(node, up) == Screened::handled) return;
  if (up.incarnation() != 0) register_again(node, up);
  else register_new(node, up);
}

// Each of these answers it, puts it off, or lets it go on to the next.
Screened Coordinator::screen(NodeId node, const proto::RankUp& up) {
  const auto refused = [&](refusals::Why why, std::string reason) {
    refuse(node, up, why, std::move(reason));
    return Screened::handled;
  };
  if (screen_log(node, up) == Screened::handled) return Screened::handled;  // also of a place that a larger job has
  if (up.replica() >= config_.replicas || up.rank() >= config_.ranks)
    return refused(refusals::Why::job,
                   fmt::format("replica {} rank {} is outside this job of {} replicas × {} ranks, both numbered from 0",
                               up.replica(), up.rank(), config_.replicas, config_.ranks));
  if (finished() && up.incarnation() == 0) {
    send_finished(node, up);
    return Screened::handled;
  }
  if (up.version() > kMostSteps)
    return refused(refusals::Why::offer,
                   fmt::format("its state's version is {}, and steps are numbered up to {}", up.version(), kMostSteps));
  if (up.incarnation() == 0 && screen_place(node, up) == Screened::handled) return Screened::handled;
  if (screen_declaration(node, up) == Screened::handled) return Screened::handled;
  if (auto contradiction = contradicted(up)) return refused(refusals::Why::job, std::move(*contradiction));
  return Screened::goes_on;
}

// It was registered before, and comes back: its daemon or this coordinator was started again.
void Coordinator::register_again(NodeId node, const proto::RankUp& up) {
  const ReplicaId id(up.replica());
  const auto found = replicas_.find(id);
  const MemberState* m = members_.find(id);
  const RankState* there = rank_of(ProcessId::of(up));
  const bool same = found != replicas_.end() && found->second.incarnation.value == up.incarnation();
  // An incarnation that was given out twice, by a log that was put back, too. Who is here has the place.
  if (const RankState* here = same && there == nullptr ? &found->second.ranks[up.rank()] : nullptr;
      here != nullptr && here->registered)
    return refuse(node, up, refusals::Why::place,
                  fmt::format("process {} on node {} is replica {} rank {} in incarnation {}, too: end one of them",
                              here->pid, node_name(*here), id, up.rank(), up.incarnation()));
  // By its instance, too: what an earlier leader called it is over when it hears the later one.
  const bool known = same || there != nullptr;
  const SuspendedReplica* out = out_for_now(id);
  const bool from_log = (out != nullptr && out->incarnation.value == up.incarnation() && !out->ended) ||
                        (m != nullptr && m->incarnation.value == up.incarnation());
  // An earlier instance of this coordinator has given it out. To which replica older logs do not say, and one that was
  // put back may have given it to two.
  const auto is_anothers = [&](const auto& one) {
    return one.first != id && one.second.incarnation.value == up.incarnation();
  };
  const bool only_registered = never_members_.may_be_of(up.incarnation(), up.replica(), up.rank()) &&
                               (found == replicas_.end() || found->second.incarnation.value < up.incarnation()) &&
                               std::ranges::none_of(replicas_, is_anothers);
  if (!known && !from_log && !only_registered) {
    const auto reason = reason_for_being_out(id);
    warn("replica {} rank {}, which has come back, is sent away: {}", id, up.rank(), reason);
    return evict(node, id, Incarnation(up.incarnation()), reason, up.job());
  }
  // Whoever had its place has ended.
  if (!known && !from_log) remove(id, fmt::format("rank {} was started again", up.rank()));
  auto& replica = replicas_[id];
  if (!known) replica.incarnation = Incarnation(up.incarnation());
  const bool was_fully_registered = fully_registered(replica);
  if (recovering_until_ || there == nullptr || !there->connected_node) on_return();
  keep(replica, node, up);
  welcome_back(node, up, replica);
  if (!was_fully_registered && fully_registered(replica)) on_fully_registered(id);
  if (versions_of(replica.ranks[up.rank()]).spoken.version() < protocol_.version()) lower_protocol();
  on_reduced(node, reduced_of(up));  // stale, unless it is of this epoch and step
  take_back_while_stopped(id);
  if (!ends_.empty()) end_recovery_if_all_are_back();  // it may be what is left of a replica of which a rank has ended
  try_start();
}

void Coordinator::refuse(NodeId node, const proto::RankUp& up, refusals::Why why, std::string reason) {
  proto::ToNode answer;
  auto& refused = *answer.mutable_refused();
  refused.set_replica(up.replica());
  refused.set_rank(up.rank());
  refused.set_instance(up.instance());
  refused.set_reason(std::move(reason));
  refused.set_why(static_cast<std::uint32_t>(why));
  warn("replica {} rank {} was refused: {}", up.replica(), up.rank(), refused.reason());
  if (why == refusals::Why::place)
    actions_.notes.back().like = fmt::format("replica {} rank {} was refused its place", up.replica(), up.rank());
  send(node, std::move(answer));
}

// Who comes to a finished job has no part in it: it is registered by name only, so that it can hear the last plan.
void Coordinator::send_finished(NodeId node, const proto::RankUp& up) {
  auto& record = actions_.append.emplace_back();
  auto& given_out = *record.mutable_incarnated();
  given_out.set_incarnation(++last_incarnation_);
  given_out.set_replica(up.replica());
  given_out.set_rank(up.rank());
  note_never_members(record);
  nodes_[node].hosts.add(up.rank(), std::uint64_t{up.rank()} + 1);
  welcome(node, up, Incarnation(last_incarnation_));
  send_plan(node);
}

// It was registered by a coordinator with another log, or has heard decisions that this log lacks. It is neither sent
// away, since it may have the last copy of its job's state, nor taken in: only this coordinator can be in the wrong
// place.
Screened Coordinator::screen_log(NodeId node, const proto::RankUp& up) {
  if (up.incarnation() == 0 || up.job() == 0 || job_ == 0) return Screened::goes_on;
  if (up.job() != job_) {
    // That other coordinator has decided nothing: it may be sent away.
    if (up.heard_epoch() == 0) {
      const auto reason = fmt::format(
          "it belongs to job {:016x}, and this coordinator's is {:016x} (has its daemon another job's --connect?)",
          up.job(), job_);
      warn("replica {} rank {} is sent away: {}", up.replica(), up.rank(), reason);
      evict(node, ReplicaId(up.replica()), Incarnation(up.incarnation()), reason, up.job());
      return Screened::handled;
    }
    auto what = fmt::format(
        "replica {} rank {}: it belongs to job {:016x}, which has committed step {}; this log is of job {:016x}, which "
        "has committed step {}: {}, or end that process",
        up.replica(), up.rank(), up.job(), up.heard_committed(), job_, committed_,
        runs() ? "give its daemon that job's --connect" : "start the coordinator with that job's --log-directory");
    warn("{}", what);
    constexpr std::size_t most_elsewhere = 256;  // in places that this job does not have
    const bool has_place = up.replica() < config_.replicas && up.rank() < config_.ranks;
    if (has_place || strangers_.size() < std::size_t{config_.replicas} * config_.ranks + most_elsewhere)
      strangers_[RankPlace::of(up)] = {node, up.instance(), std::move(what)};
    return Screened::handled;
  }
  return find_outdated(up) ? Screened::handled : Screened::goes_on;
}

// Once the log is known to be an older copy, all who come and have heard more are named: without them it can go on.
// Returns whether this one has.
bool Coordinator::find_outdated(const proto::RankUp& up) {
  if (up.incarnation() == 0 || up.job() != job_) return false;
  if (up.heard_epoch() <= epoch_.value && up.heard_committed() <= most_committed_.value) return false;
  const bool has_place = up.replica() < config_.replicas && up.rank() < config_.ranks;
  if ((outdated_ && !has_place) || !heard_more_.insert(RankPlace::of(up)).second) return true;
  heard_up_to_ = std::max(heard_up_to_, {up.heard_committed(), up.heard_epoch()});
  constexpr std::size_t most = 8;
  std::vector<std::string> names;
  for (const auto& place : heard_more_)
    if (names.size() < most) names.push_back(fmt::format("replica {} rank {}", place.replica, place.rank));
  const std::size_t others = heard_more_.size() - names.size();
  const bool several = heard_more_.size() > 1;
  const bool known = outdated_.has_value();
  outdated_ = fmt::format(
      "the log is an older copy: it ends with step {} in epoch {}, and {}{} {} of step {} in epoch {}. Nothing is "
      "decided until the coordinator is started with the whole log, or, to go on from this one, without {}",
      most_committed_, epoch_, fmt::join(names, ", "), others > 0 ? fmt::format(" and {} others", others) : "",
      several ? "have heard, at the most," : "has heard", heard_up_to_.first, heard_up_to_.second,
      several ? "those processes" : "that process");
  if (known)
    warn("replica {} rank {} has heard of step {} in epoch {}, too, which this log lacks", up.replica(), up.rank(),
         up.heard_committed(), up.heard_epoch());
  else warn("{}", *outdated_);
  return true;
}

// A process that has not been registered yet, or none that anything depended on.
void Coordinator::register_new(NodeId node, const proto::RankUp& up) {
  const ReplicaId id(up.replica());
  auto found = replicas_.find(id);
  // If this replica lives already, that instance has ended without our hearing of it.
  if (found != replicas_.end() && !found->second.ranks.empty() && found->second.ranks[up.rank()].registered) {
    if (found->second.ranks[up.rank()].instance == up.instance()) {
      keep(found->second, node, up);  // it never heard our answer; its daemon may be another one by now
      return welcome_back(node, up, found->second);
    }
    remove(id, fmt::format("rank {} was started again", up.rank()));
    found = replicas_.find(id);
  }
  // Of an incarnation that an earlier coordinator has given out somebody else may have this place, and come back.
  const bool may_be_taken =
      found != replicas_.end() ? !found->second.begun_here : members_.find(id) != nullptr || out_for_now(id) != nullptr;
  if (may_be_taken) {
    const bool registered_only = members_.find(id) == nullptr && out_for_now(id) == nullptr;
    remove(id, registered_only
                   ? fmt::format("rank {} has come as a new process, and a coordinator that was started, or "
                                 "has taken over, since the others of this replica came does not know "
                                 "whether it is the first in its place",
                                 up.rank())
                   : fmt::format("rank {} was started again", up.rank()));
    found = replicas_.find(id);
  }
  if (found == replicas_.end()) {
    const Incarnation incarnation(++last_incarnation_);
    proto::LogRecord record;
    record.mutable_incarnated()->set_incarnation(last_incarnation_);
    record.mutable_incarnated()->set_replica(id.value);
    note_never_members(record);
    actions_.append.push_back(std::move(record));
    found = replicas_.emplace(id, ReplicaState{.incarnation = incarnation, .begun_here = true}).first;
  }
  ReplicaState& replica = found->second;
  keep(replica, node, up).lost_at = now_;
  welcome(node, up, replica.incarnation);
  if (!fully_registered(replica)) return;
  note("replica {} has registered", id);
  on_fully_registered(id);
  try_start();
}

// Those who differ in what they declare could not connect with each other.
void Coordinator::on_fully_registered(ReplicaId id) {
  const bool differed = declarations_.dissent();
  settle_declarations();
  auto found = replicas_.find(id);
  if (differed) {
    unannounced_ = true;
  } else if (found != replicas_.end()) {
    end_recovery_if_all_are_back();
    if (!recovering_until_) announce_replica(found->second, id), tell_prospect();
  }
  announce_after_dissent();
}

void Coordinator::welcome(NodeId node, const proto::RankUp& up, Incarnation incarnation) {
  proto::ToNode answer;
  auto& registered = *answer.mutable_registered();
  registered.set_replica(up.replica());
  registered.set_rank(up.rank());
  registered.set_instance(up.instance());
  registered.set_incarnation(incarnation.value);
  registered.set_job(job_);
  if (!links_.all(config_.replicas)) put_rule(links_, registered);
  send(node, std::move(answer));
}

// A rank that we know: the plan again, since one that it heard before could not mean it.
void Coordinator::welcome_back(NodeId node, const proto::RankUp& up, const ReplicaState& replica) {
  welcome(node, up, replica.incarnation);
  if (declarations_.dissent()) {
    unannounced_ = true;
  } else if (recovering_until_) {
    if (fully_registered(replica)) end_recovery_if_all_are_back();  // which announces all to everybody
  } else {
    announcer_.add_pending(node, RankSet(up.rank()), now_);
    if (fully_registered(replica))
      send_each(announcer_.news(ReplicaId(up.replica()), replica, RankSet(up.rank()), nodes_, {node}));
  }
  if (finished()) send_plan(node);  // it may be the last that this coordinator says
  else if (started()) announcer_.add_pending_plan(node, now_);
  if (present(ReplicaId(up.replica()), replica.incarnation) && announcer_.flushes_at_once(now_)) flush_announcements();
  if (has_contributors()) prospect_.receivers.clear();  // it is sent again
  else if (!prospect_.ring.empty() && prospect_.candidates == 0) send(node, prospect_.message(job_));
}

void Coordinator::send_plan(NodeId node) {
  proto::ToNode current;
  *current.mutable_plan() = plan();
  send(node, std::move(current));
}

// As it says of itself now.
RankState& Coordinator::keep(ReplicaState& replica, NodeId node, const proto::RankUp& up) {
  replica.ranks.resize(config_.ranks);
  RankState& rank = replica.ranks[up.rank()];
  prospect_.stale = true;
  declarations_.registers(replica, up);
  declarations_.forget_refused(up);
  const auto process = ProcessId::of(up);
  if (const auto before = nodes_.find(rank.node);
      rank.connected_node && rank.instance == up.instance() && rank.node != node && before != nodes_.end())
    before->second.moved.push_back(process);
  std::erase(nodes_[node].moved, process);
  rank.node = node;
  near_.stale |= replica.statuses.come(up.rank(), node);
  if (rank.instance != up.instance())  // the same measure comes again with each connection
    audit_.on_digest_time(up.rank(), std::chrono::microseconds(std::min<std::uint64_t>(up.digest_us(), 1'000'000'000)));
  rank.instance = up.instance();
  rank.version = up.version();
  rank.digest = up.digest();
  rank.trained = keep_brought(Samples(up.trained(), kMostSamples));
  rank.connected_node = true;
  rank.pid = up.pid();
  for (auto& claim : claims_)  // it is asked again, through where it is now
    if (claim.up.replica() == up.replica() && claim.up.rank() == up.rank()) claim.asked = {};
  rank.daemon = up.daemon();
  keep_versions(rank, node, up);
  rank.weighs = up.weighs();
  rank.passes_on = up.passes_on();
  std::string_view location = up.location();
  if (const auto right = Location::parse(location); !location.empty() && !right) {
    warn_once(
        fmt::format("replica {} rank {} on node {}: {}", up.replica(), up.rank(), up.node(), right.error().message));
    location = {};
  }
  rank.texts = RankTexts({up.address(), up.stream_address(), up.card(), location, up.node()});
  if (auto line = strange_stream(ReplicaId(up.replica()), up.rank()); !line.empty()) warn_once(std::move(line));
  nodes_[node].hosts.add(up.rank(), std::uint64_t{up.rank()} + 1);
  return rank;
}

// Where this process was stopped, what a daemon sent over a connection that it has left since may be heard behind what
// it sent over the next one. So whoever was heard over both when the first of them is lost says once more where it
// stands. `dropped`: those that asked for a place, and do no more. False: nobody was heard over both.
bool Coordinator::ask_the_other_nodes(NodeId lost, const ConnectedNode& was, const std::vector<ProcessId>& dropped) {
  std::set<NodeId> asked;
  for (const auto& one : was.moved)
    if (const RankState* rank = rank_of(one); rank != nullptr && rank->connected_node) asked.insert(rank->node);
  for (auto& [node, state] : nodes_)
    std::erase_if(state.moved, [&, node = node](const auto& one) {
      const RankState* rank = rank_of(one);
      const auto waits = [&](const PlaceClaim& claim) { return ProcessId::of(claim.up) == one; };
      const bool asks = rank != nullptr ? !rank->connected_node && rank->node == lost
                                        : std::ranges::find(dropped, one) != dropped.end();
      if (asks) asked.insert(node);
      return asks || (rank == nullptr && std::ranges::none_of(claims_, waits));
    });
  if (asked.empty()) return false;
  proto::ToNode message;
  message.mutable_introduce()->set_number(1);  // what answers it is told from what has just connected
  send_to({asked.begin(), asked.end()}, std::move(message));
  return true;
}

// ---- who is told of whom

// Whoever is not named as a peer is fenced by the others; so after a restart nothing is announced before all members
// have had their time to come back. Then everything is. Of who has ended nothing is to come: where somebody contributes
// and all others are back, it is out at once.
void Coordinator::end_recovery_if_all_are_back() {
  if (!recovering_until_) return;
  if (!members_.empty() && !has_contributors()) return;  // a joiner may yet say that it has caught up
  bool all_back = true, goes_on = false;
  for (const auto& m : members_) {
    const bool back = is_back(m);
    if (!back && (finished() || !has_ended(m))) return;
    all_back &= back;
    goes_on |= back && !m.catching_up;
  }
  if (all_back) recovering_until_.reset(), announce_all();
  else if (goes_on) settle_ends();  // with the last of them it comes here again
}

void Coordinator::announce_all() { send_each(announcer_.all(nodes_, replicas_)); }

// All of its ranks have come: to them all others, and to all others them.
void Coordinator::announce_replica(const ReplicaState& replica, ReplicaId id) {
  std::set<NodeId> its;
  for (const auto& rank : replica.ranks) its.insert(rank.node);
  for (auto one : its)
    if (const auto node = nodes_.find(one); node != nodes_.end()) announcer_.add_pending(one, node->second.hosts, now_);
  if (announcer_.flushes_at_once(now_)) flush_announcements();
  RankSet all;
  all.add(0, config_.ranks);
  send_each(announcer_.news(id, replica, all, nodes_, its));
}

void Coordinator::flush_announcements() {
  auto pending = announcer_.take_pending(now_);
  if (declarations_.dissent()) unannounced_ |= !pending.of_ranks.empty();
  else
    for (const auto& [ranks, nodes] : pending.of_ranks) send_each(announcer_.all_peers(nodes, ranks, replicas_));
  if (pending.of_plan.empty()) return;
  proto::ToNode current;
  *current.mutable_plan() = plan();
  send_to(std::move(pending.of_plan), std::move(current));
}

}  // namespace rejoin::membership
