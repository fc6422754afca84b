// Which protocol the processes of the job speak, and which one all of its members do.
#include "base/bytes.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

// Most ranks have the same few: each is kept once, and not more than there can be in an orderly job.
void Coordinator::keep_versions(RankState& rank, NodeId node, const proto::RankUp& up) {
  constexpr std::size_t most = 64;
  RankVersions its{.spoken = Spoken::through(std::max(up.speaks(), kSilentProtocol), nodes_[node].spoken),
                   .release = printable(up.release(), kLongestRelease),
                   .of_daemon = printable(up.daemon_release(), kLongestRelease)};
  const auto known = [&] {
    return std::ranges::find_if(versions_, [&](const RankVersions& one) {
      return one.spoken.version() == its.spoken.version() && one.release == its.release &&
             one.of_daemon == its.of_daemon;
    });
  };
  if (versions_.size() >= most && known() == versions_.end()) its.release = its.of_daemon = "?";
  auto found = known();
  if (found == versions_.end()) found = versions_.insert(found, std::move(its));
  rank.versions = static_cast<std::uint16_t>(found - versions_.begin());
}

// Of who has not come back yet it is not known whether it still speaks what it did. Who is suspended counts, too: it
// may be taken back before it has said anything, to a coordinator that has not heard it before.
Spoken Coordinator::spoken_by_all() const {
  Spoken lowest = of_coordinators_.value_or(Spoken());
  const auto lower = [&](Spoken to) { lowest = Spoken(std::min(lowest.version(), to.version())); };
  lower(Spoken(kProtocolVersion));
  const auto lower_to = [&](const auto& one) {
    const ReplicaState* here = registration(one.replica, one.incarnation);
    if (here == nullptr || !fully_registered(*here)) lower(protocol_);
    if (here == nullptr) return;
    for (const auto& rank : here->ranks)
      if (rank.registered) lower(versions_of(rank).spoken);
  };
  for (const auto& m : members_) lower_to(m);
  for (const auto& out : suspended_)
    if (!out.ended) lower_to(out);
  return lowest;
}

bool Coordinator::protocol_rises() const {
  // In most jobs it can't rise, and nobody need be asked at each commit.
  return protocol_.version() < kProtocolVersion && !members_.empty() && !finished() &&
         spoken_by_all().version() > protocol_.version();
}

// A daemon or relay of an older release has taken another's place under members that stay.
void Coordinator::lower_protocol() {
  if (members_.empty() || finished() || stopped_ || recovering_until_) return;
  const Spoken now = spoken_by_all();
  if (now.version() >= protocol_.version()) return;
  next_epoch(fmt::format("members speak protocol {}, no longer {}", now.version(), protocol_.version()));
}

}  // namespace rejoin::membership
