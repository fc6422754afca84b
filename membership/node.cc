#include "membership/node.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "base/release.h"
#include "membership/digest_table.h"
#include "membership/greeting.h"
#include "membership/paces.h"
#include "membership/process.h"

namespace rejoin::membership {

Node::Actions Node::on_coordinator_up(TimePoint now, std::uint64_t introduction) {
  Actions actions;
  coordinator_up_ = true;
  coordinator_heard_ = heartbeat_sent_ = now;
  proto::FromNode hello;
  *hello.mutable_hello() = hello_of(name_, silence_);
  hello.mutable_hello()->set_introduction(introduction);
  actions.to_coordinator.push_back(std::move(hello));
  for (const auto& one : ended_) *actions.to_coordinator.emplace_back().mutable_rank_down() = one.down;
  for (auto& [connection, rank] : ranks_) {
    proto::FromNode up;
    *up.mutable_rank_up() = rank.up;
    actions.to_coordinator.push_back(std::move(up));
  }
  statuses_.clear();
  for (const auto& [connection, rank] : ranks_) report_status(rank, actions);
  return actions;
}

Node::Actions Node::on_coordinator_message(const proto::ToNode& message, TimePoint now) {
  Actions actions;
  coordinator_heard_ = now;
  const auto to_instance = [&](std::uint32_t replica, std::uint32_t number, std::uint64_t instance, auto change) {
    for (auto& [connection, rank] : ranks_)
      if (rank.up.replica() == replica && rank.up.rank() == number && rank.up.instance() == instance) {
        change(rank);
        send(connection, message, actions);
      }
  };
  switch (message.kind_case()) {
    case proto::ToNode::kIntroduce: return on_coordinator_up(now, message.introduce().number());
    case proto::ToNode::kWelcome: pace_ = pace_of("this daemon", silence_, message.welcome(), actions.notes); break;
    case proto::ToNode::kLeads:  // for LeaderTracker
    case proto::ToNode::kHeartbeat: break;
    case proto::ToNode::kRegistered: {
      const auto& registered = message.registered();
      to_instance(registered.replica(), registered.rank(), registered.instance(), [&](RankInfo& rank) {
        rank.up.set_incarnation(registered.incarnation());
        rank.up.set_job(registered.job());
        rank.registered = true;
        const auto came_before = [&](const auto& one) {  // another job may wait for who had its place there
          return same_place(one, registered) && !of_another_job(one.job(), registered.job());
        };
        std::erase_if(silent_, [&](const auto& one) { return came_before(one.second); });
        std::erase_if(ended_, [&](const Ended& one) { return came_before(one.down); });
        // What was said in between may have gone to a coordinator, or a relay, that did not know it, or not any more.
        statuses_.erase(status_key(rank.up));
        report_status(rank, actions);
      });
      break;
    }
    case proto::ToNode::kRefused:
      to_instance(message.refused().replica(), message.refused().rank(), message.refused().instance(),
                  [](RankInfo&) {});
      break;
    case proto::ToNode::kEvicted:
      for (const auto& [connection, rank] : ranks_)
        if (rank.up.replica() == message.evicted().replica() &&
            rank.up.incarnation() == message.evicted().incarnation() &&
            !of_another_job(rank.up.job(), message.evicted().job()))
          send(connection, message, actions);
      break;
    case proto::ToNode::kPeers: {
      if (concerns_nobody(message.peers().job())) break;
      const RankSet touched = peers_.apply(message.peers());
      for (auto& [connection, rank] : ranks_)
        if (touched.contains(rank.up.rank()) && !of_another_job(rank.up.job(), message.peers().job()))
          tell_of_peers(connection, rank, message.peers(), actions);
      break;
    }
    case proto::ToNode::kPlan:
      if (concerns_nobody(message.plan().job())) break;
      plan_ = message.plan();
      forget_ended();
      for (auto& [connection, rank] : ranks_) {
        if (of_another_job(rank.up.job(), plan_.job())) continue;
        if (rank.up.incarnation() != 0 && rank.up.job() == plan_.job()) {
          rank.up.set_heard_epoch(std::max(rank.up.heard_epoch(), plan_.epoch()));
          rank.up.set_heard_committed(std::max(rank.up.heard_committed(), plan_.committed()));
        }
        send(connection, message, actions);
      }
      break;
    case proto::ToNode::kInquiry:
      for (const auto& [connection, rank] : ranks_) {
        const auto& asked = message.inquiry();
        if (rank.up.replica() != asked.replica() || rank.up.rank() != asked.rank() ||
            rank.up.instance() != asked.instance())
          continue;
        auto& alive = *actions.to_coordinator.emplace_back().mutable_alive();
        alive.set_replica(asked.replica());
        alive.set_rank(asked.rank());
        alive.set_instance(asked.instance());
        alive.set_silent_ms(static_cast<std::uint64_t>(milliseconds(now - rank.heard)));
      }
      break;
    case proto::ToNode::kDeclare:
      to_instance(message.declare().replica(), message.declare().rank(), message.declare().instance(),
                  [](RankInfo&) {});
      break;
    case proto::ToNode::kWaits:
      for (const auto& [connection, rank] : ranks_) send(connection, message, actions);
      break;
    case proto::ToNode::kProspect:
      for (const auto& [connection, rank] : ranks_)
        if (!of_another_job(rank.up.job(), message.prospect().job())) send(connection, message, actions);
      break;
    case proto::ToNode::KIND_NOT_SET:
      actions.notes.push_back({"an empty message from the coordinator was ignored", true});
      break;
  }
  return actions;
}

void Node::write_hosts(proto::LeaderView& view) const {
  std::map<std::uint32_t, RankSet> hosted;
  std::uint64_t job = 0;
  for (const auto& [connection, rank] : ranks_) {
    hosted[rank.up.replica()].add(RankSet(rank.up.rank()));
    const bool of_plan = plan_.epoch() > 0 && plan_.job() == rank.up.job();
    const bool takes_part = of_plan ? !plan_.finished() : rank.up.heard_epoch() > 0;
    if (rank.up.incarnation() != 0 && takes_part && (job == 0 || job != view.job())) job = rank.up.job();
  }
  view.set_job(job);
  membership::write_hosts(hosted, view);
}

void write_hosts(const std::map<std::uint32_t, RankSet>& hosted, proto::LeaderView& view) {
  for (const auto& [replica, ranks] : hosted) {
    auto& host = *view.add_hosts();
    host.set_replica(replica);
    ranks.to(host.mutable_ranks());
  }
}

// All ranks here are another job's: their streams go on as they are.
bool Node::concerns_nobody(std::uint64_t job) const {
  return !ranks_.empty() && std::all_of(ranks_.begin(), ranks_.end(),
                                        [&](const auto& one) { return of_another_job(one.second.up.job(), job); });
}

// A rank of a large job has many peers, and each of them comes once: what is said of one does not grow with all.
void Node::tell_of_peers(RankConnection connection, RankInfo& rank, const proto::Peers& news, Actions& actions) const {
  proto::ToNode message;
  const RankSet its(rank.up.rank());
  const bool knew = std::exchange(rank.knows_peers, true);
  const bool all = !knew || RankSet(news.complete(), ~std::uint64_t{0}).includes(its);
  proto::Peers whole;
  if (all) whole = peers_.complete(its);
  const auto& peers = all ? whole.peers() : news.peers();
  if (all) *message.mutable_peers()->mutable_complete() = whole.complete();
  else *message.mutable_peers()->mutable_gone() = news.gone();
  std::size_t bytes = 0;
  for (const auto& peer : peers) {
    if (peer.rank() != rank.up.rank()) continue;
    if (bytes += peer.ByteSizeLong(); bytes > kMostOfPeers) {
      message.mutable_peers()->set_more(true);
      send(connection, std::exchange(message, {}), actions);
      bytes = peer.ByteSizeLong();
    }
    *message.mutable_peers()->add_peers() = peer;
  }
  message.mutable_peers();  // also where there is none
  send(connection, message, actions);
}

void Node::send(RankConnection rank, const proto::ToNode& message, Actions& actions) const {
  actions.to_ranks.emplace_back(rank, message);
}

Node::Actions Node::on_rank_message(RankConnection connection, const proto::FromNode& message, TimePoint now) {
  Actions actions;
  auto found = ranks_.find(connection);
  if (message.kind_case() == proto::FromNode::kRankUp) {
    if (found != ranks_.end()) {
      actions.notes.push_back({"a rank registered twice on one connection; ignored", true});
      return actions;
    }
    RankInfo& rank = ranks_[connection] = {
        .up = message.rank_up(), .heard = now, .registered = message.rank_up().incarnation() != 0};
    std::erase_if(silent_, [&](const auto& one) { return same_process(one.second, rank.up); });
    std::erase_if(ended_, [&](const Ended& one) { return same_process(one.down, rank.up); });
    rank.up.set_node(name_);
    rank.up.set_daemon(id_);
    rank.up.set_location(location_);
    rank.up.set_daemon_release(release());
    if (coordinator_up_) *actions.to_coordinator.emplace_back().mutable_rank_up() = rank.up;
    // Its reduction may be what those of the others have waited for.
    if (message.rank_up().reduced_epoch() != 0) gather(ranks_.at(connection), actions);
    return actions;
  }
  if (found == ranks_.end()) {
    actions.notes.push_back({"a message from a rank that has not registered was ignored", true});
    return actions;
  }
  RankInfo& rank = found->second;
  rank.heard = now;
  if (message.kind_case() == proto::FromNode::kReduced) {
    rank.up.set_reduced_epoch(message.reduced().epoch());
    rank.up.set_reduced_step(message.reduced().step());
    rank.compute_us = message.reduced().compute_us();
    rank.up.set_results_digest(message.reduced().results_size() > 0 ? message.reduced().results(0) : 0);
    rank.up.set_state_digest(message.reduced().state_size() > 0 ? message.reduced().state(0) : 0);
    gather(rank, actions);
    return actions;
  }
  if (message.kind_case() == proto::FromNode::kLinks) {
    rank.links.emplace(message.links().incarnations(), ~std::uint64_t{0});
    rank.unreached.assign(message.links().unreached().begin(), message.links().unreached().end());
    rank.round_trips = RoundTrips(message.links().round_trips());
    rank.rates = LinkRates(message.links().rates());
    report_status(rank, actions);
  } else if (message.kind_case() == proto::FromNode::kCaughtUp) {
    if (message.caught_up().instance() == rank.up.instance()) rank.caught_up = true;
    report_status(rank, actions);
  } else if ((message.has_accusation() || message.has_details() || message.has_drift() || message.has_declaration()) &&
             coordinator_up_) {
    if (message.accusation().unconnected()) rank.unconnected_in = message.accusation().epoch();
    actions.to_coordinator.push_back(message);
  }
  return actions;
}

void keep_common(std::optional<Incarnations>& links, const Incarnations& its) {
  links = links ? links->common(its) : its;
}

// The first of each peer.
void add_unreached(const proto::Unreached& one, proto::ReplicaStatus& status) {
  const bool known = std::any_of(status.unreached().begin(), status.unreached().end(),
                                 [&](const auto& other) { return other.incarnation() == one.incarnation(); });
  if (!known) *status.add_unreached() = one;
}

// Each job counts its incarnations from 1.
bool Node::are_one_replica(const RankInfo& one, const RankInfo& other) {
  return one.up.replica() == other.up.replica() && one.up.incarnation() == other.up.incarnation() &&
         !of_another_job(one.up.job(), other.up.job());
}

// One report of how all ranks of the replica on this node stand, when all have reported it and where it changed.
void Node::report_status(const RankInfo& one, Actions& actions) {
  if (!coordinator_up_ || !one.registered) return;
  proto::FromNode message;
  auto& status = *message.mutable_replica_status();
  status.set_replica(one.up.replica());
  status.set_incarnation(one.up.incarnation());
  status.set_caught_up(true);
  RankSet together;
  std::optional<Incarnations> links;
  RoundTrips round_trips;
  LinkRates rates;
  for (const auto& [connection, rank] : ranks_) {
    if (!are_one_replica(rank, one)) continue;
    if (!rank.links) return;
    together.add(RankSet(rank.up.rank()));
    if (!rank.caught_up) status.set_caught_up(false);
    keep_common(links, *rank.links);
    round_trips.keep_longer(rank.round_trips);
    rates.keep_lower(rank.rates);
    for (const auto& unreached : rank.unreached) add_unreached(unreached, status);
  }
  together.to(status.mutable_ranks());
  links->to(status.mutable_links());
  round_trips.to(status.mutable_round_trips());
  rates.to(status.mutable_rates());
  auto& sent = statuses_[status_key(one.up)];
  if (std::string now = status.SerializeAsString(); std::exchange(sent, now) != now)
    actions.to_coordinator.push_back(std::move(message));
}

// One report for all ranks of the replica on this node, when the last of them is done. Where one had said that it
// lacked a connection each is reported at once, with those who are done by then: that is how the coordinator hears that
// it has that now, and it is to know who hangs.
void Node::gather(const RankInfo& last, Actions& actions) {
  const auto done = [&](const RankInfo& rank) {
    return rank.up.reduced_epoch() == last.up.reduced_epoch() && rank.up.reduced_step() == last.up.reduced_step();
  };
  const auto had_lacked = [&](const auto& one) {
    const RankInfo& rank = one.second;
    return rank.unconnected_in != 0 && rank.unconnected_in == last.up.reduced_epoch() && done(rank) &&
           are_one_replica(rank, last);
  };
  const bool at_once = std::ranges::any_of(ranks_, had_lacked);
  bool all = true;
  proto::FromNode message;
  auto& reduced = *message.mutable_reduced();
  reduced.set_replica(last.up.replica());
  reduced.set_epoch(last.up.reduced_epoch());
  reduced.set_step(last.up.reduced_step());
  reduced.set_incarnation(last.up.incarnation());
  RankSet together;
  ComputeTime computed;
  DigestTable digests;
  for (const auto& [connection, rank] : ranks_) {
    if (!are_one_replica(rank, last)) continue;
    if (!done(rank)) {
      if (!at_once) return;
      all = false;
      continue;
    }
    together.add(RankSet(rank.up.rank()));
    computed.add(rank.compute_us);
    if (rank.up.rank() < kMostRanks) digests.put(rank.up.rank(), {rank.up.results_digest(), rank.up.state_digest()});
  }
  if (at_once && all)
    for (auto& one : ranks_)
      if (had_lacked(one)) one.second.unconnected_in = 0;
  together.to(reduced.mutable_ranks());
  reduced.set_compute_us(computed.us());
  digests.write_to(together, reduced);
  if (coordinator_up_) actions.to_coordinator.push_back(std::move(message));
}

bool Node::move(RankConnection rank, const std::string& address, const std::string& stream_address,
                const std::string& card) {
  auto found = ranks_.find(rank);
  if (found == ranks_.end()) return false;
  auto& up = found->second.up;
  if (up.address() == address && up.stream_address() == stream_address && up.card() == card) return false;
  up.set_address(address);
  up.set_stream_address(stream_address);
  up.set_card(card);
  return true;
}

Node::Actions Node::on_tick(TimePoint now) {
  Actions actions;
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{}) {
    actions.notes.push_back(
        {fmt::format("this daemon was paused for {:.0f} ms; nobody is put out for that time", milliseconds(pause)),
         true});
    for (auto& [connection, rank] : ranks_) forgive(rank.heard, pause, now);
    forgive(coordinator_heard_, pause, now);
  }
  std::vector<RankConnection> silent;
  for (const auto& [connection, rank] : ranks_)
    if (now - rank.heard > silence_ && !pause_detector_.settling(now)) silent.push_back(connection);
  for (auto connection : silent) {
    auto gone =
        on_rank_gone(connection, fmt::format("its process gave no sign of life for {:.0f} ms", milliseconds(silence_)),
                     Gone::silent);
    std::move(gone.to_coordinator.begin(), gone.to_coordinator.end(), std::back_inserter(actions.to_coordinator));
    std::move(gone.notes.begin(), gone.notes.end(), std::back_inserter(actions.notes));
    actions.silent.push_back(connection);
  }
  if (coordinator_up_ && now - heartbeat_sent_ >= pace_) {
    heartbeat_sent_ = now;
    proto::FromNode heartbeat;
    heartbeat.mutable_heartbeat();
    actions.to_coordinator.push_back(std::move(heartbeat));
  }
  return actions;
}

}  // namespace rejoin::membership
