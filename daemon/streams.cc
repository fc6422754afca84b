#include "daemon/streams.h"

namespace rejoin::daemon {

namespace {

constexpr std::size_t kLongestFamily = 40;
constexpr char kBorder = '=';

void add_source(LocalStream& stream, const proto::Peer& peer, const std::string& family) {
  const ReplicaId replica(peer.replica());
  const Incarnation incarnation(peer.incarnation());
  const std::string& address = peer.stream_address();
  const auto border = address.find(kBorder);
  const std::string its = border == std::string::npos ? "" : address.substr(0, border);
  if (its == family) stream.sources.insert({replica, incarnation, {address.substr(border + 1)}, stream.job});
  else stream.strange.insert({replica, incarnation, printable(its, kLongestFamily)});
}

}  // namespace

std::string stream_address(const std::string& family, const std::string& address) { return family + kBorder + address; }

std::vector<LocalStream> streams_of(const membership::Node& node, const std::string& family) {
  std::vector<LocalStream> streams;
  for (const auto& [connection, info] : node.ranks()) {
    LocalStream& stream = streams.emplace_back();
    stream.rank = connection;
    stream.key = {ReplicaId(info.up.replica()), RankId(info.up.rank())};
    stream.job = info.up.job();
    stream.committed = Step(node.plan().committed());
    for (const auto& member : node.plan().members()) {
      if (member.replica() == info.up.replica() && member.incarnation() == info.up.incarnation()) {
        stream.catching_up = member.catching_up();
        if (!member.catching_up()) stream.serves = Incarnation(member.incarnation());
      }
      if (member.catching_up()) continue;
      for (const auto& peer : node.peers().of(info.up.rank()))
        if (peer.replica() == member.replica() && peer.incarnation() == member.incarnation())
          add_source(stream, peer, family);
    }
  }
  return streams;
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
