#include "rejoin/driver.h"

#include <algorithm>

#include "base/events.h"
#include "base/fail.h"
#include "base/flight.h"
#include "base/log.h"
#include "membership/node.h"
#include "membership/versions.h"
#include "rejoin/step.h"

namespace rejoin {

namespace {

constexpr int kMeasureEvery = 16;  // silences: connections' round trips

}  // namespace

Driver::Driver(const DriverConfig& config, transport::Engine& engine, local::Owner& owner,
               std::vector<ftar::BucketSpec> buckets)
    : config_(config),
      engine_(engine),
      owner_(owner),
      buckets_(std::move(buckets)),
      machine_(config.replica),
      wanted_(buckets_.size()),
      submitted_(buckets_.size()),
      done_(buckets_.size()),
      reduced_(buckets_.size()) {}

Result<> Driver::prepare() {
  auto audit = StateAudit::make(owner_);
  if (!audit) return tl::unexpected(audit.error());
  auto ring = ftar::Communicator::prepare(engine_, config_.ring, buckets_);
  if (!ring) return tl::unexpected(ring.error());
  audit_ = std::move(*audit);
  prepared_ = std::move(*ring);
  return {};
}

void Driver::fail(Error error) {
  if (failure_) return;
  failure_ = std::move(error);
  ++revision_;
}

void Driver::want(const std::vector<bool>& buckets, TimePoint now) {
  wanted_ = buckets;
  time_trainer(now);
}

void Driver::take(std::uint64_t step, TimePoint now) {
  taken_ = step;
  time_trainer(now);
}

// From the step's beginning to its last gradient, in which nobody else is waited for.
void Driver::time_trainer(TimePoint now) {
  if (computed_.step != taken_) computed_ = {.step = taken_, .since = now, .busy = {}, .took = {}, .paused = false};
  if (computed_.took || !std::ranges::all_of(wanted_, [](bool wanted) { return wanted; })) return;
  const Duration busy = computed_.busy + busy_otherwise(now);
  computed_.took = std::max<Duration>(now - computed_.since - busy, std::chrono::microseconds(1));
}

// What it is busy with says nothing of how fast it computes; this is what of that lies in the step, so far.
Duration Driver::busy_otherwise(TimePoint now) const {
  if (!occupied_ || occupied_->computes || computed_.took) return {};
  return std::max(Duration{}, now - std::max(occupied_->since, computed_.since));
}

void Driver::poll(TimePoint now) {
  if (!ring_ || failure_) return;
  take_details();
  submit_wanted(now);
  poll_ring(now);
  if (!pause_detector_.settling(now)) look_for_stalls(now);
  if (now >= measure_at_) {
    measure_at_ = now + kMeasureEvery * silence_;
    measure_all();
  }
  if (now < reach_at_) return;
  reach_at_ = now + silence_;
  ring_->drop_unfinished(silence_, now);
  reach_peers();
}

Duration Driver::notice(TimePoint now) {
  const Duration pause = pause_detector_.on_tick(now);
  if (pause == Duration{}) return pause;
  events::record(events::Kind::paused, {.a = static_cast<std::uint64_t>(pause.count())});
  pause_ = pause;
  back_at_ = now;
  disturbed_ = true;
  computed_.paused = true;
  forgive_trainer(pause, now);
  for (TimePoint* since : {&digests_since_, &landing_since_})
    if (*since != TimePoint{}) *since += pause;
  if (ring_) ring_->forgive(pause, now);
  return pause;
}

// What it hears of that comes within two silences.
Duration Driver::recent_pause(TimePoint now) const {
  if (const Duration unseen = pause_detector_.unseen(now); unseen > Duration{}) return unseen;
  return now - back_at_ <= 2 * silence_ ? pause_ : Duration{};
}

// Out, and why; it may be its own silence.
void Driver::put_out(const std::string& why, TimePoint now) {
  events::record(events::Kind::put_out, {}, why);
  const Duration pause = this->recent_pause(now);
  fail({ErrorCode::cancelled,
        pause > silence_ / 2 ? fmt::format("this process was silent for {:.1f} s, and its replica was put out of the "
                                           "job: {}; start it again to catch up",
                                           seconds(pause), why)
                             : fmt::format("this replica is out of the job: {}; start it again to catch up", why)});
}

proto::FromNode Driver::heartbeat() const {
  proto::FromNode heartbeat;
  auto& counted = *heartbeat.mutable_heartbeat();
  const ftar::Stats stats = ring_ ? ring_->stats() : ftar::Stats{};
  counted.set_operations(stats.operations_done);
  counted.set_bytes_reduced(stats.bytes_reduced);
  counted.set_stale_dropped(stats.stale_dropped);
  for (const auto& peer : stats.peers) {
    auto& hop = *counted.add_hops();
    hop.set_replica(peer.member.replica.value);
    hop.set_chunks(peer.chunks_received);
    hop.set_bytes(peer.bytes_received);
    hop.set_longest_gap_us(static_cast<std::uint64_t>(peer.longest_gap / std::chrono::microseconds(1)));
    hop.set_recent_gap_us(static_cast<std::uint64_t>(peer.recent_gap / std::chrono::microseconds(1)));
    hop.set_coded_bits(peer.coded_bits);
  }
  if (config_.ring.coding != ftar::Coding::off) {
    auto& coding = *counted.mutable_coding();
    coding.set_plain_bytes(stats.plain_bytes_sent);
    coding.set_sent_bytes(stats.chunk_bytes_sent);
    if (stats.coding_error) coding.set_error(*stats.coding_error);
    coding.set_feedback_bytes(stats.feedback_bytes);
  }
  for (const auto& rail : engine_.rails()) {
    auto& row = *counted.add_rails();
    row.set_peers(rail.peers);
    row.set_up(rail.up);
  }
  return heartbeat;
}

void Driver::describe(proto::RankUp& up) const {
  up.set_replica(config_.replica.value);
  up.set_rank(config_.rank);
  up.set_instance(config_.instance);
  up.set_incarnation(machine_.incarnation().value);
  up.set_plan_hash(config_.plan_hash);
  up.set_settings(fmt::format("{} in chunks of {} bytes, {} in flight, up to {} bytes direct", config_.transport,
                              config_.ring.chunk_bytes, config_.ring.chunks_in_flight,
                              config_.ring.device ? config_.ring.device_direct_bytes : config_.ring.direct_bytes));
  up.set_job(job_);
  up.set_card(config_.card);
  up.set_card_listening(config_.card_listening);
  up.set_weighs(config_.weighs);
  up.set_heard_epoch(machine_.epoch().value);
  up.set_heard_committed(machine_.committed().value);
  if (!machine_.reduced()) return;
  up.set_reduced_epoch(machine_.epoch().value);
  up.set_reduced_step(machine_.step().value);
  up.set_results_digest(digests_.reduced);
  up.set_state_digest(digests_.state);
}

void Driver::poll_ring(TimePoint now) {
  bool links_changed = false, came_up = false;
  for (const auto& outcome : ring_->poll(now)) {
    ++outcomes_;
    switch (outcome.kind) {
      case ftar::Outcome::Kind::done:
        reduced_[outcome.bucket] = outcome.step.value;
        if (outcome.epoch == ring_->epoch() && outcome.step == machine_.step()) done_[outcome.bucket] = true;
        break;
      case ftar::Outcome::Kind::failed: return fail(*outcome.error);
      case ftar::Outcome::Kind::entered:
        events::record(events::Kind::entered, {.epoch = outcome.epoch.value});
        more_to_reach_ |= links_.has_value();
        came_up = true;
        break;
      case ftar::Outcome::Kind::peer_up:
        events::record(events::Kind::peer_up,
                       {.replica = outcome.member.replica.value, .a = outcome.member.incarnation.value});
        links_changed = true;
        came_up = true;
        measure(outcome.member);
        unreached_.erase(outcome.member.incarnation);
        break;
      case ftar::Outcome::Kind::peer_left:
        links_changed = true;
        ++links_closed_;
        if (to_be_linked(outcome.member)) reach_at_ = now;
        break;
      case ftar::Outcome::Kind::peer_lost: {
        links_changed = true;
        logger().debug("lost replica {}: {}", outcome.member.replica, outcome.error->message);
        events::record(events::Kind::peer_lost,
                       {.replica = outcome.member.replica.value, .a = outcome.member.incarnation.value},
                       outcome.error->message);
        const bool again = not_reached(outcome.member, outcome.error->message);
        // What goes on with others is not to be ended for it: it connects again, and the coordinator's status has it.
        if (ring_->needs(outcome.member)) {
          Broken broken{outcome.error->message, outcome.error->code != ErrorCode::unavailable};
          record(accuse_of_loss(outcome.member.replica, broken));
          auto& known = broken_[outcome.member.replica];
          if (broken.found || !known.found) known = std::move(broken);
        }
        reach_at_ = std::min(reach_at_, now + silence_ / (again ? 2 : 64));
        break;
      }
    }
  }
  if (links_changed) report_links();
  if (came_up && more_to_reach_) reach_peers();
  report_reduced();
}

// Hands over what the trainer has asked for, or, while catching up, everything.
void Driver::submit_wanted(TimePoint now) {
  if (!machine_.member() || !machine_.has_contributors() || ring_->epoch() != machine_.epoch() || machine_.reduced())
    return;
  if (!current_ || current_->step != machine_.step().value) return;
  if (inspection_) return;  // outputs and state stay as they are until it has ended
  // A joiner's outputs hold the gradients of the step before until the trainer is done with them.
  const bool contributes = machine_.contributes();  // which looks for this replica among all members
  if (!contributes && taken_ != machine_.step().value) return;
  ring_->notice(now);
  for (std::uint32_t b = 0; b < buckets_.size(); ++b) {
    if (submitted_[b] || (contributes && !wanted_[b])) continue;
    submitted_[b] = true;
    owner_.set_phase(local::Phase::reduce);
    if (auto started = ring_->all_reduce(b, machine_.step(), ReduceOp::mean, machine_.weights()); !started)
      return fail(started.error());
  }
}

void Driver::on_control_message(const proto::ToNode& message, TimePoint now) {
  switch (message.kind_case()) {
    case proto::ToNode::kRegistered: {
      const auto incarnation = message.registered().incarnation();
      // Its first message had come to a later leader, too: nobody reaches it by what it heard from the one before.
      if (machine_.incarnation() != Incarnation{}) {
        const bool anew = incarnation > machine_.incarnation().value && !machine_.member() && !finished_;
        return anew ? put_out("another leader has registered it anew", now) : void();
      }
      if (incarnation == 0)
        return fail({ErrorCode::corrupt,
                     "the daemon has registered this rank without an incarnation: run a daemon of this release"});
      machine_.on_registered(Incarnation(incarnation));
      job_ = message.registered().job();
      flight::set_job(job_);
      events::record(events::Kind::registered, {.a = machine_.incarnation().value});
      ++revision_;
      REJOIN_CHECK(prepared_, "a rank is registered that was not prepared");
      ring_ = std::move(prepared_);
      link_rule_ = membership::rule_in(message.registered());
      ring_->join({config_.replica, machine_.incarnation()}, {.job = job_, .rank = config_.rank, .links = link_rule_});
      choose_links();
      on_peers({});
      return;
    }
    case proto::ToNode::kRefused: return fail({ErrorCode::refused, message.refused().reason()});
    case proto::ToNode::kEvicted:
      if (message.evicted().incarnation() == machine_.incarnation().value) put_out(message.evicted().reason(), now);
      return;
    case proto::ToNode::kPeers: return on_peers(message.peers());
    case proto::ToNode::kPlan: return on_plan(message.plan(), now);
    case proto::ToNode::kProspect: return on_prospect(message.prospect());
    case proto::ToNode::kDeclare: {
      auto& declaration = *reports_.emplace_back().mutable_declaration() = config_.declared;
      declaration.set_replica(config_.replica.value);
      declaration.set_rank(config_.rank);
      declaration.set_instance(config_.instance);
      return;
    }
    case proto::ToNode::kWaits: return on_waits(message.waits());
    case proto::ToNode::kHeartbeat:
    case proto::ToNode::kInquiry:  // the daemon's, as are the next
    case proto::ToNode::kLeads:
    case proto::ToNode::kWelcome:
    case proto::ToNode::kIntroduce:
    case proto::ToNode::KIND_NOT_SET: return;
  }
}

void Driver::on_plan(const proto::Plan& plan, TimePoint now) {
  inspect_if_asked(plan);
  const bool contributed = machine_.contributes();
  const std::uint64_t under_way = machine_.step().value;
  const std::uint32_t contributors = machine_.contributors();
  const auto meaning = machine_.on_plan(plan);
  using Meaning = membership::Rank::Meaning;
  if (meaning == Meaning::evicted) return put_out("a step was committed without it", now);
  if (meaning == Meaning::nothing) return;
  if (meaning == Meaning::over || meaning == Meaning::cut_short) {
    if (over_ = meaning == Meaning::over; over_) brought_last_ = tell_of_over(config_.from, plan);
    else logger().warn("the job is finished with step {}: its coordinator has that as --steps now", plan.committed());
    finished_ = true;
    current_.reset();
    ++revision_;
    return;
  }
  if (meaning == Meaning::committed) {
    constexpr std::size_t remembered = 16;
    if (committed_at_ != TimePoint{} && !disturbed_ && !plan.excused()) step_times_.push_back(now - committed_at_);
    if (step_times_.size() > remembered) step_times_.erase(step_times_.begin());
    committed_at_ = now;
  }
  disturbed_ = meaning == Meaning::new_epoch;
  if (const auto& why = plan.stopped(); !why.empty())
    logger().error("the job has stopped after step {}: {}", plan.committed(), why);
  ring_->digest_results(plan.has_audit());
  if (machine_.epoch_changed() && machine_.has_contributors()) enter_epoch();
  if (meaning == Meaning::committed || meaning == Meaning::finished) {
    committed_ = under_way;
    committed_contributes_ = contributed;
    committed_contributors_ = contributors;
    committed_trained_ = membership::Samples(plan.trained(), membership::kMostSamples);
    wanted_.assign(buckets_.size(), false);  // until the trainer has taken up the next step, they were of this one
    events::record(events::Kind::committed, {.epoch = plan.epoch(), .step = under_way});
  }
  if (meaning == Meaning::finished && !finished_) finished_ = true, tell_of_end(machine_.contributes(), plan);
  current_.reset();
  if (machine_.member() && machine_.has_contributors() && !finished_)
    current_ = StepView{.step = machine_.step().value,
                        .contributes = machine_.contributes(),
                        .leads = machine_.leads(),
                        .contributors = machine_.contributors(),
                        .batch = machine_.batch(),
                        .shares_batch = plan.ahead().together() > 0 || plan.balances(),
                        .weight = machine_.weight(),
                        .ahead = membership::Ahead(plan, config_.replica),
                        .epoch = plan.epoch(),
                        .settled = plan.settled(),
                        .cards = cards(),
                        .trained = membership::Samples(plan.trained(), membership::kMostSamples)};
  submitted_.assign(buckets_.size(), false);
  done_.assign(buckets_.size(), false);
  ++revision_;
}

// What of the step under way is done again.
void Driver::record_epoch() const {
  events::Numbers numbers{.epoch = machine_.epoch().value, .step = machine_.step().value};
  const bool again = current_ && current_->step == machine_.step().value;
  for (std::size_t b = 0; again && b < buckets_.size(); ++b) {
    if (!submitted_[b]) continue;
    ++numbers.a;
    numbers.b += buckets_[b].count * size_of(buckets_[b].type);
    numbers.number += done_[b];
  }
  std::string members;
  for (const auto& m : machine_.plan().members())
    members += fmt::format("{}{}{}", members.empty() ? "" : ",", m.replica(), m.catching_up() ? "c" : "");
  events::record(events::Kind::enter_epoch, numbers, members + "\n");
}

// In the plan's order. What a trainer says of itself comes with its address, before it is a member.
std::vector<std::pair<ReplicaId, std::string>> Driver::cards() const {
  std::vector<std::pair<ReplicaId, std::string>> cards;
  for (const auto& m : machine_.plan().members()) {
    if (m.catching_up()) continue;
    const bool own = m.replica() == config_.replica.value;
    const auto peer = std::ranges::lower_bound(peers(), m.replica(), {}, &proto::Peer::replica);
    const bool known = peer != peers().end() && peer->incarnation() == m.incarnation();
    cards.emplace_back(ReplicaId(m.replica()), own ? config_.card : known ? peer->card() : "");
  }
  return cards;
}

void Driver::enter_epoch() {
  if (machine_.epoch() <= ring_->epoch()) return;
  waits_for_.clear();
  std::vector<ftar::RingMember> ring_members;
  for (const auto& m : machine_.plan().members()) {
    ring_members.push_back({member_of(m), m.catching_up() ? ftar::Role::catching_up : ftar::Role::contributor});
    came_late_ |= m.catching_up() && m.replica() == config_.replica.value;
  }
  record_epoch();
  broken_.clear();
  // Whoever is out is fenced by this. It connects again, to be there if it is taken back.
  const auto spoken = membership::Spoken::in_epoch(machine_.plan().protocol());
  ring_->enter(machine_.epoch(), std::move(ring_members),
               spoken.may(membership::Feature::chunking) ? ftar::Chunking::now : ftar::Chunking::of_protocol_15);
  events::emit("links", {{"epoch", machine_.epoch().value},
                         {"connections", std::uint64_t{ring_->peers().size()}},
                         {"missing", std::uint64_t{ring_->missing()}}});
  choose_links();
  reach_peers();
}

}  // namespace rejoin
