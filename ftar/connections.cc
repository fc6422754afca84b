// A communicator's connections with the other members.
#include <algorithm>
#include <bit>

#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "ftar/operation.h"

namespace rejoin::ftar {

namespace {

// Who calls, and whom: an address may lead to somebody else of the same job.
struct Hello {
  std::uint64_t job;
  std::uint64_t plan;
  std::uint32_t rank;
  std::uint32_t replica;
  std::uint64_t incarnation;
  std::uint32_t wanted_replica;
  std::uint32_t unused = 0;
  std::uint64_t wanted_incarnation;
};

}  // namespace

Peer* Communicator::peer_of(transport::EndpointId endpoint) {
  auto found = by_endpoint_.find(endpoint);
  return found == by_endpoint_.end() ? nullptr : found->second;
}

Peer* Communicator::peer_of(Member member) {
  auto found = peers_.find(member);
  return found == peers_.end() ? nullptr : found->second.get();
}

std::vector<Member> Communicator::peers() const {
  std::vector<Member> all;
  for (const auto& [member, peer] : peers_) all.push_back(member);
  return all;
}

bool Communicator::connected(Member member) const {
  auto found = peers_.find(member);
  return found != peers_.end() && found->second->up;
}

std::optional<Duration> Communicator::round_trip(Member member) const {
  auto found = peers_.find(member);
  return found == peers_.end() || !found->second->up ? std::nullopt : engine_.round_trip(found->second->endpoint);
}

std::vector<std::pair<Member, double>> Communicator::take_link_rates() {
  std::vector<std::pair<Member, double>> all;
  for (auto& [member, peer] : peers_) {
    const auto best = peer->rate.take_best();
    const std::size_t position = peer->position, members = ring_.size();
    if (!best || position == members) continue;
    if ((position + 1) % members == position_ || (position_ + 1) % members == position) all.emplace_back(member, *best);
  }
  return all;
}

std::size_t Communicator::connecting() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(peers_, [](const auto& one) { return one.second->called && !one.second->up; }));
}

Result<> Communicator::connect(Member member, const transport::Address& address) {
  if (peers_.contains(member)) return {};
  const Hello hello{.job = group_.job,
                    .plan = plan_hash(),
                    .rank = group_.rank,
                    .replica = self_.replica.value,
                    .incarnation = self_.incarnation.value,
                    .wanted_replica = member.replica.value,
                    .wanted_incarnation = member.incarnation.value};
  auto endpoint = engine_.connect(address, bytes_of(hello));
  if (!endpoint) return tl::unexpected(endpoint.error());
  auto& peer = peers_[member] = std::make_unique<Peer>();
  peer->member = member;
  peer->called = true;
  peer->address = address.text;
  peer->endpoint = *endpoint;
  peer->since = now_;
  by_endpoint_[*endpoint] = peer.get();
  place(*peer);
  return {};
}

// Somebody may yet answer at the address of before; then the peer hears a connection end, and the next one come. A call
// that goes nowhere would last for a silence, in which this epoch's flush waits for it.
void Communicator::on_address(Member member, const transport::Address& address) {
  const Peer* peer = peer_of(member);
  if (peer != nullptr && peer->called && !peer->up && peer->address != address.text) forget(member);
}

void Communicator::on_accepted(const transport::Event& event) {
  Hello hello{};
  BytesView bytes = event.message;
  if (!take(bytes, hello) || hello.job != group_.job) {
    ++strangers_;
    refusals::count(refusals::Why::job);
    if (std::has_single_bit(strangers_))  // they may come for ever
      logger().warn(
          "a data connection of another job, or of another transport, was refused: {} so far; give all replicas the "
          "same --transport",
          strangers_);
    return engine_.close(event.endpoint);
  }
  const Member member{ReplicaId(hello.replica), Incarnation(hello.incarnation)};
  const Member wanted{ReplicaId(hello.wanted_replica), Incarnation(hello.wanted_incarnation)};
  if (hello.rank != group_.rank || wanted != self_) {
    refusals::count(refusals::Why::absent);
    if (std::has_single_bit(++misdirected_))
      logger().warn(
          "a connection of replica {} rank {} that was meant for instance {} of replica {} came to instance {} of "
          "replica {} rank {}, and was refused: {} so far",
          member.replica, hello.rank, wanted.incarnation, wanted.replica, self_.incarnation, self_.replica, group_.rank,
          misdirected_);
    return engine_.close(event.endpoint);
  }
  if (hello.plan != plan_hash()) {
    refusals::count(refusals::Why::declaration);
    logger().error("replica {} has another bucket plan or other chunk settings; both must be the same on all replicas",
                   member.replica);
    return engine_.close(event.endpoint);
  }
  if (auto* before = peer_of(member)) {
    const bool both_call = before->called && !before->up;
    if (both_call && self_.incarnation > member.incarnation) return engine_.close(event.endpoint);  // ours counts
    if (both_call) remove(*before);
    else lose(*before, {ErrorCode::unavailable, "the peer connected anew"});
  }
  auto& peer = peers_[member] = std::make_unique<Peer>();
  peer->member = member;
  peer->endpoint = event.endpoint;
  peer->since = now_;
  by_endpoint_[event.endpoint] = peer.get();
  place(*peer);
  introduce(*peer);
}

void Communicator::introduce(Peer& peer) {
  Bytes body;
  const auto append = [&](const transport::RemoteRegion& region) {
    const auto bytes = bytes_of(region);
    body.insert(body.end(), bytes.begin(), bytes.end());
  };
  append(engine_.remote(staging_region_));
  for (const auto& bucket : buckets_) append(engine_.remote(bucket.output));
  if (auto sent = send(peer, MessageHeader::introduction, 0, pulls_ ? kPulls : 0, body); !sent)
    return lose(peer, sent.error());
  (void)offer_coding(peer);
}

void Communicator::on_introduction(Peer& peer, std::uint64_t abilities, BytesView rest) {
  peer.pulls = (abilities & kPulls) != 0;
  peer.inputs.resize(buckets_.size());
  peer.outputs.resize(buckets_.size());
  bool whole = take(rest, peer.staging);
  for (auto& output : peer.outputs) whole = whole && take(rest, output);
  if (!whole || !rest.empty() || peer.up)
    return lose(peer, {ErrorCode::corrupt, "the peer's introduction does not fit the bucket plan"});
  peer.up = true;
  refresh(peer);
  outcomes_.push_back({.kind = Outcome::Kind::peer_up, .member = peer.member});
  if (epoch_ == Epoch{}) return;
  if (clean_) return offer_surplus(peer);
  if (peer.partner) last_progress_ = now_;
  if (!announced_) return try_flush();
  // It takes the place of one that was surplus to both, before this epoch: nothing of this one has gone through that.
  if (!was_clean_ && owes_flush(peer)) (void)tell_flush(peer);
}

void Communicator::lose(Peer& peer, Error error) {
  const Member member = peer.member;
  const auto kind = peer.offered == Epoch{} ? Outcome::Kind::peer_lost : Outcome::Kind::peer_left;
  remove(peer);
  outcomes_.push_back({.kind = kind, .member = member, .error = std::move(error)});
  try_flush();
}

// ---- what is surplus

// Connections that neither end needs are closed when both have said so in the same epoch, of which both are through
// with the flush: then neither writes through it, or waits for anything from it. So nobody loses one that the other
// end has given up in an epoch that it has yet to hear of.
void Communicator::offer_surplus(Peer& peer) {
  if (!clean_ || !peer.up || !peer.surplus) return;
  if (peer.heard_surplus == epoch_) {
    const Member member = peer.member;
    remove(peer);
    return outcomes_.push_back({.kind = Outcome::Kind::peer_left, .member = member});
  }
  if (std::exchange(peer.offered, epoch_) == epoch_) return;
  if (auto sent = send(peer, MessageHeader::surplus, 0, 0); !sent) lose(peer, sent.error());
}

void Communicator::on_surplus(Peer& peer, Epoch epoch) {
  peer.heard_surplus = std::max(peer.heard_surplus, epoch);
  offer_surplus(peer);
}

// Closed, also where it has failed by itself: until then an engine keeps what belongs to it.
void Communicator::remove(Peer& peer) {
  engine_.close(peer.endpoint);
  by_endpoint_.erase(peer.endpoint);
  if (peer.position < ring_peers_.size()) ring_peers_[peer.position] = nullptr;
  const auto owned = peers_.extract(peer.member);
  // Its writes in flight are void with the endpoint; what ran with it waits for the next epoch. What runs with others
  // goes on.
  if (!owned.mapped()->partner) return;
  clean_ = false;
  for (auto& bucket : buckets_) bucket.running.reset();
}

void Communicator::drop_unfinished(Duration patience, TimePoint now) {
  std::vector<Peer*> unfinished;
  for (auto& [member, peer] : peers_)
    if (peer->since == TimePoint{}) peer->since = now;  // it was begun before there was a time
  for (auto& [member, peer] : peers_)
    if (!peer->up && now - peer->since > patience) unfinished.push_back(peer.get());
  for (auto* peer : unfinished)
    lose(*peer, {ErrorCode::timeout, fmt::format("no answer for {:.0f} ms", milliseconds(now - peer->since))});
}

// A process that stood still, or its machine, has not looked: of the time between two looks only so much counts.
void Communicator::drop_unanswered(Duration patience, TimePoint now) {
  std::vector<Peer*> dead;
  for (auto& [member, peer] : peers_) {
    if (!peer->up || !peer->partner) continue;
    const auto acknowledged = engine_.acknowledged(peer->endpoint);
    const Duration unseen = std::min(now - std::exchange(peer->looked_at, now), patience / 4);
    const bool moves = std::exchange(peer->acknowledged, acknowledged) != acknowledged || !acknowledged;
    peer->unanswered = moves ? Duration{} : peer->unanswered + unseen;
    if (peer->unanswered > patience) dead.push_back(peer.get());
  }
  for (auto* peer : dead)
    lose(*peer, {ErrorCode::timeout,
                 fmt::format("nothing of what is sent to it has been acknowledged for {:.1f} s; what lies between may "
                             "have forgotten the connection, or loses long packets (rejoin doctor --pairs)",
                             seconds(peer->unanswered))});
}

void Communicator::forget(Member member) {
  Peer* peer = peer_of(member);
  if (peer == nullptr) return;
  remove(*peer);
  try_flush();
}

}  // namespace rejoin::ftar
