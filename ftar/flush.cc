// Between two epochs: when nothing of an older one can land any more. A member hears only of those with which it has to
// do in this epoch, or had to do before: of a large ring they are few.
#include <fmt/format.h>

#include <algorithm>

#include "ftar/operation.h"

namespace rejoin::ftar {

// By position, ascending: with whom this member exchanges anything in this epoch. They say the same of it.
std::vector<std::uint32_t> Communicator::partners() const {
  const auto members = static_cast<std::uint32_t>(ring_.size());
  std::vector<bool> is(members);
  const auto neighbours = [&](std::uint32_t of) {
    is[(position_ + 1) % of] = true;
    is[(position_ + of - 1) % of] = true;
  };
  for (const auto& bucket : buckets_) {
    if (direct(bucket)) {
      is.assign(members, true);
    } else if (doubled(bucket)) {
      const Doubling rounds = doubling();
      for (std::uint32_t place = 0; place <= rounds.result(); ++place)
        if (const auto sender = rounds.sender(place)) is[*sender] = true;
      for (auto to : rounds.beyond()) is[to] = true;
      if (!rounds.in_core()) is[rounds.proxy()] = true;
    } else if (may_pull()) {
      is.assign(members, true);
    } else {
      neighbours(members);
      if (position_ < contributors_) neighbours(contributors_);
    }
  }
  is[position_] = false;
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < members; ++i)
    if (is[i]) all.push_back(i);
  return all;
}

// As far as this member and the number of members go; whether the others can is known when they are connected.
bool Communicator::may_pull() const {
  constexpr std::size_t most = 16;  // everyone tells everyone
  return pulls_ && contributors_ > 1 && ring_.size() <= most &&
         ring_.size() <= group_.links.full_mesh_members.value_or(kMaxMembers);
}

// All members find the same: what each can do, it has told all.
bool Communicator::pulled(const Bucket& bucket) const {
  return !bucket.small && may_pull() &&
         std::ranges::all_of(ring_peers_, [](const Peer* peer) { return peer == nullptr || peer->pulls; });
}

std::vector<Member> Communicator::links() const {
  std::vector<Member> all;
  for (auto position : links_)
    if (position != position_) all.push_back(ring_[position].member);
  return all;
}

std::size_t Communicator::missing() const {
  return static_cast<std::size_t>(std::ranges::count_if(
      partners_, [&](std::uint32_t i) { return ring_peers_[i] == nullptr || !ring_peers_[i]->up; }));
}

bool Communicator::needs(Member member) const {
  const auto found = positions_.find(member);
  return found != positions_.end() && std::ranges::binary_search(partners_, found->second);
}

// Where it stands in this epoch's ring, if it does.
void Communicator::place(Peer& peer) {
  const auto found = positions_.find(peer.member);
  const bool in_ring = found != positions_.end();
  peer.position = in_ring ? found->second : static_cast<std::uint32_t>(ring_.size());
  peer.partner = std::ranges::binary_search(partners_, peer.position);
  peer.surplus = in_ring && !std::ranges::binary_search(links_, peer.position);
  if (in_ring) ring_peers_[peer.position] = &peer;
}

// Whoever waits for ours, or whose own is waited for: either may not have been in the epochs that the other was in
// since they met. So who is told, and has not told, tells.
bool Communicator::owes_flush(const Peer& peer) const {
  if (!peer.up || peer.flush_sent == epoch_) return false;
  return peer.partner || peer.flushed == epoch_ || !peer.fenced() ||
         (peer.met != Epoch{} && peer.flush_sent <= peer.met);
}

// False where it is lost.
bool Communicator::tell_flush(Peer& peer) {
  peer.flush_sent = epoch_;
  const auto sent = send(peer, MessageHeader::flushed, 0, 0);
  if (!sent) lose(peer, sent.error());
  return sent.has_value();
}

void Communicator::on_flushed(Peer& peer, Epoch epoch) {
  peer.flushed = std::max(peer.flushed, epoch);
  if (epoch > peer.offered) peer.offered = {};  // it has not taken that up
  if (announced_ && owes_flush(peer) && !tell_flush(peer)) return;
  try_flush();
}

// Our half of the flush when our writes are over, and the end of it when those of all others are that may have written
// here.
void Communicator::try_flush() {
  if (epoch_ == Epoch{} || clean_ || was_clean_) return;  // once in an epoch: what has begun does not begin anew
  for (auto i : partners_)
    if (ring_peers_[i] == nullptr || !ring_peers_[i]->up) return;  // not connected (yet)
  for (const auto& [member, peer] : peers_)
    if (peer->writes_in_flight > 0) return;
  // What the device still adds up for an older epoch reads staging and writes outputs.
  if (device_works() || device_failed_) return;
  if (!std::exchange(announced_, true)) {
    for (std::size_t i = 0; i < ring_peers_.size(); ++i)
      if (ring_peers_[i] != nullptr && owes_flush(*ring_peers_[i])) (void)tell_flush(*ring_peers_[i]);
    if (clean_) return;  // by the loss of one of them
  }
  for (auto i : partners_)
    if (ring_peers_[i] == nullptr || ring_peers_[i]->flushed != epoch_) return;
  for (auto* peer : ring_peers_)
    if (peer != nullptr && !peer->fenced()) return;
  clean_ = was_clean_ = true;
  for (auto i : partners_) ring_peers_[i]->met = epoch_;
  last_progress_ = now_;
  outcomes_.push_back({.kind = Outcome::Kind::entered, .epoch = epoch_});
  for (auto& bucket : buckets_)
    if (bucket.wanted && !bucket.running) begin(bucket);
  for (std::size_t i = 0; i < ring_peers_.size(); ++i)
    if (ring_peers_[i] != nullptr) offer_surplus(*ring_peers_[i]);
}

// First what keeps this member itself from saying that it is through.
std::vector<Wait> Communicator::flush_waits(Duration since) const {
  std::vector<Wait> waits;
  for (const auto& [member, peer] : peers_)
    if (peer->writes_in_flight > 0)
      waits.push_back({.on = member,
                       .what = fmt::format("the end of {} writes to its memory from before epoch {}",
                                           peer->writes_in_flight, epoch_.value),
                       .to_land = true,
                       .since = since});
  for (std::uint32_t i = 0; i < ring_.size(); ++i) {
    const Peer* peer = ring_peers_[i];
    const bool up = peer != nullptr && peer->up;
    const bool partner = std::ranges::binary_search(partners_, i);
    if (partner ? up && peer->flushed == epoch_ : peer == nullptr || peer->fenced()) continue;
    waits.push_back(
        {.on = ring_[i].member,
         .what = up ? fmt::format("its flush of epoch {}", epoch_.value) : std::string("a connection with it"),
         .unconnected = !up,
         .since = since});
  }
  return waits;
}

}  // namespace rejoin::ftar
