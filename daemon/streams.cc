#include "daemon/streams.h"

#include <algorithm>

namespace rejoin::daemon {

namespace {

constexpr std::size_t kLongestFamily = 40;
constexpr char kBorder = '=';

// Where it is not known where this node is, all are alike.
std::size_t distance_to(const proto::Peer& peer, const Location& here) {
  if (!here.known()) return 0;
  return here.distance(Location::parse(peer.location()).value_or(Location()));
}

struct StreamAt {
  std::string family, address;
};

StreamAt stream_of(const proto::Peer& peer) {
  const std::string& address = peer.stream_address();
  const auto border = address.find(kBorder);
  if (border == std::string::npos) return {"", address};
  return {address.substr(0, border), address.substr(border + 1)};
}

void add_source(LocalStream& stream, const proto::Peer& peer, const std::string& family, const Location& here) {
  const ReplicaId replica(peer.replica());
  const Incarnation incarnation(peer.incarnation());
  const auto its = stream_of(peer);
  if (its.family != family) stream.strange.insert({replica, incarnation, printable(its.family, kLongestFamily)});
  else if (stream.catching_up)
    stream.sources.insert({replica, incarnation, {its.address}, stream.job, distance_to(peer, here)});
}

const proto::Peer* peer_of(const membership::Node& node, std::uint32_t rank, const proto::Member& member) {
  const auto& peers = node.peers().of(rank);  // by replica
  const auto found = std::ranges::lower_bound(peers, member.replica(), {}, &proto::Peer::replica);
  const bool is_it =
      found != peers.end() && found->replica() == member.replica() && found->incarnation() == member.incarnation();
  return is_it ? &*found : nullptr;
}

// The joiners that say that they pass on what they have, in the order of the plan, which all know alike; and of those
// only who is not farther away than a contributor.
void add_chain(LocalStream& stream, const membership::Node& node, const std::string& family, const Location& here) {
  std::size_t nearest = ~std::size_t{0};
  for (const auto& source : stream.sources) nearest = std::min(nearest, source.distance);
  std::vector<catchup::SourceAddress> joiners;
  std::optional<std::uint32_t> own;
  for (const auto& member : node.plan().members()) {
    if (!member.catching_up()) continue;
    const auto number = static_cast<std::uint32_t>(joiners.size());
    const auto* peer = peer_of(node, stream.key.rank.value, member);
    if (member.replica() == stream.key.replica.value) own = number;
    else if (peer == nullptr || !peer->passes_on() || stream_of(*peer).family != family ||
             distance_to(*peer, here) > nearest)
      continue;
    joiners.push_back({ReplicaId(member.replica()),
                       Incarnation(member.incarnation()),
                       {peer == nullptr ? "" : stream_of(*peer).address},
                       stream.job});
  }
  if (!own) return;
  stream.chain.own = *own;
  stream.chain.of = static_cast<std::uint32_t>(joiners.size());
  for (auto fellow : catchup::fellows_of(stream.chain.own, stream.chain.of))
    stream.chain.fellows.insert(joiners[fellow]);
}

}  // namespace

std::string stream_address(const std::string& family, const std::string& address) { return family + kBorder + address; }

std::vector<LocalStream> streams_of(const membership::Node& node, const std::string& family, const Location& here) {
  std::vector<LocalStream> streams;
  for (const auto& [connection, info] : node.ranks()) {
    LocalStream& stream = streams.emplace_back();
    stream.rank = connection;
    stream.key = {ReplicaId(info.up.replica()), RankId(info.up.rank())};
    stream.job = info.up.job();
    const auto& members = node.plan().members();
    const auto self = std::ranges::find_if(members, [&up = info.up](const auto& member) {
      return member.replica() == up.replica() && member.incarnation() == up.incarnation();
    });
    if (self != members.end()) {
      stream.catching_up = self->catching_up();
      stream.serves = Incarnation(self->incarnation());
    }
    for (const auto& member : members)
      if (!member.catching_up())
        if (const auto* peer = peer_of(node, info.up.rank(), member)) add_source(stream, *peer, family, here);
    if (stream.catching_up && info.up.passes_on()) add_chain(stream, node, family, here);
  }
  return streams;
}

Streams::Basis Streams::basis_of(const membership::Node& node) {
  Basis basis;
  for (const auto& member : node.plan().members())
    basis.members.push_back({member.replica(), member.incarnation(), member.catching_up()});
  for (const auto& [connection, info] : node.ranks())
    basis.ranks.push_back({connection.value, info.up.incarnation(), info.up.job()});
  return basis;
}

const std::vector<std::shared_ptr<const LocalStream>>& Streams::of(const membership::Node& node, bool other_peers) {
  Basis basis = basis_of(node);
  if (!other_peers && basis_ == basis) return streams_;
  basis_ = std::move(basis);
  ++made_;
  streams_.clear();
  for (auto& stream : streams_of(node, family_, here_))
    streams_.push_back(std::make_shared<const LocalStream>(std::move(stream)));
  return streams_;
}

proto::FromNode report_of(const catchup::Service::CompletedRank& completed) {
  proto::FromNode message;
  message.mutable_caught_up()->set_replica(completed.key.replica.value);
  message.mutable_caught_up()->set_rank(completed.key.rank.value);
  message.mutable_caught_up()->set_instance(completed.instance);
  return message;
}

proto::FromNode report_of(const catchup::RankKey& joiner, const catchup::Drift& drift) {
  proto::FromNode message;
  auto& report = *message.mutable_drift();
  report.set_replica(joiner.replica.value);
  report.set_rank(joiner.rank.value);
  report.set_version(drift.version);
  report.set_tensor(drift.tensor);
  report.set_first(drift.first);
  report.set_count(drift.count);
  report.set_offset(drift.offset);
  report.set_total(drift.total);
  for (const auto& [source, digest] : drift.digests) {
    report.add_sources(source.value);
    report.add_digests(digest);
  }
  return message;
}

}  // namespace rejoin::daemon
