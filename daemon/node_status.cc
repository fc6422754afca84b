// What the node tells of itself (/status).
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/fail.h"
#include "base/release.h"
#include "daemon/exiting.h"
#include "daemon/metrics.h"
#include "daemon/node_server.h"

namespace rejoin::daemon {

nlohmann::json NodeServer::status() const {
  const auto streams = streams_here();
  std::uint64_t bytes_served = served_by_gone_, bytes_passed_on = passed_on_by_gone_;
  for (const auto* stream : streams) {
    bytes_served += stream->bytes_served;
    bytes_passed_on += stream->bytes_passed_on;
  }
  nlohmann::json json{{"node", options_.name},
                      {"location", options_.location},
                      {"coordinator", coordinators_.status(machine_.coordinator_up())},
                      {"protocol", membership::kProtocolVersion},
                      {"release", release()},
                      {"epoch", machine_.plan().epoch()},
                      {"committed", machine_.plan().committed()},
                      {"bytes_served", bytes_served},
                      {"bytes_passed_on", bytes_passed_on},
                      {"refetched", refetched_},
                      {"page", coordinator_page_},
                      {"standing", standing()},
                      {"rejected", rejected_}};
  json["ranks"] = nlohmann::json::array();
  for (const auto& [id, trainer] : trainers_) {
    if (!trainer.key) continue;
    auto info = machine_.ranks().find(id);
    const bool member =
        std::ranges::any_of(machine_.plan().members(), [&, key = *trainer.key](const proto::Member& one) {
          return info != machine_.ranks().end() && one.replica() == key.replica.value &&
                 one.incarnation() == info->second.up.incarnation();
        });
    nlohmann::json rank{{"replica", trainer.key->replica.value},
                        {"rank", trainer.key->rank.value},
                        {"pid", trainer.credentials.pid},
                        {"role", !member               ? "registered"
                                 : trainer.catching_up ? "catching_up"
                                                       : "contributor"}};
    if (info != machine_.ranks().end()) {
      rank["incarnation"] = info->second.up.incarnation();
      rank["protocol"] = info->second.up.speaks();
      rank["release"] = info->second.up.release();
      rank["silent_ms"] = milliseconds(now() - info->second.heard);
    }
    if (auto progress = progress_.find(*trainer.key); progress != progress_.end() && trainer.catching_up)
      rank["catch_up"] = {{"bytes", progress->second.bytes},
                          {"wire_bytes", progress->second.wire_bytes},
                          {"total_bytes", progress->second.total_bytes},
                          {"bytes_per_second", progress->second.bytes_per_second},
                          {"verified", progress->second.verified},
                          {"slices", progress->second.total_slices},
                          {"refetched", progress->second.refetched},
                          {"sources", progress->second.sources},
                          {"joiners", progress->second.fellows},
                          {"from_joiners", progress->second.from_joiners},
                          {"passed_on", progress->second.passed_on},
                          {"unreached", progress->second.unreached}};
    rank["all_reduce"] = {{"operations", trainer.ring.operations()},
                          {"bytes", trainer.ring.bytes_reduced()},
                          {"stale_dropped", trainer.ring.stale_dropped()}};
    rank["refused"] =
        refusals_json({trainer.ring.refused().data(), static_cast<std::size_t>(trainer.ring.refused_size())});
    rank["hops"] = nlohmann::json::array();
    for (const auto& hop : trainer.ring.hops())
      rank["hops"].push_back({{"replica", hop.replica()},
                              {"chunks", hop.chunks()},
                              {"bytes", hop.bytes()},
                              {"longest_gap_us", hop.longest_gap_us()},
                              {"recent_gap_us", hop.recent_gap_us()},
                              {"coded_bits", hop.coded_bits()}});
    if (trainer.ring.has_coding()) {
      const auto& coding = trainer.ring.coding();
      rank["coding"] = {{"plain_bytes", coding.plain_bytes()},
                        {"sent_bytes", coding.sent_bytes()},
                        {"feedback_bytes", coding.feedback_bytes()}};
      if (coding.has_error() && std::isfinite(coding.error())) rank["coding"]["error"] = coding.error();
    }
    rank["rails"] = nlohmann::json::array();
    for (const auto& rail : trainer.ring.rails()) rank["rails"].push_back({{"peers", rail.peers()}, {"up", rail.up()}});
    json["ranks"].push_back(std::move(rank));
  }
  json["gone"] = nlohmann::json::array();
  for (const auto& [key, gone] : gone_)
    json["gone"].push_back({{"replica", key.replica.value},
                            {"rank", key.rank.value},
                            {"pid", gone.pid},
                            {"lives", gone.began && gone.began == began(gone.pid)},
                            {"reason", gone.reason},
                            {"for_ms", milliseconds(now() - gone.at)}});
  json["serving"] = nlohmann::json::array();
  for (const auto* stream : streams)
    for (const auto& [key, stats] : stream->serving)
      json["serving"].push_back({{"replica", key.replica.value},
                                 {"rank", key.rank.value},
                                 {"device", stream->device->address()},
                                 {"bytes", stats.bytes},
                                 {"wire_bytes", stats.wire_bytes},
                                 {"passed_on", stats.passed_on},
                                 {"zstd", stats.coding},
                                 {"link_bytes_per_second", stats.link_bytes_per_second},
                                 {"coder_bytes_per_second", stats.coder_bytes_per_second},
                                 {"coded_ratio", stats.ratio}});
  return json;
}

// The coordinator hears what its page shows of every node. Nothing follows from it.
void NodeServer::tell() {
  constexpr auto kTellEvery = std::chrono::seconds(1);
  const TimePoint at = now();
  if (!machine_.coordinator_up() || at - reported_at_ < kTellEvery) return;
  const Duration since_last = at - std::exchange(reported_at_, at);
  std::set<ReplicaId> here;
  for (const auto& [id, trainer] : trainers_)
    if (trainer.key) here.insert(trainer.key->replica);
  for (auto replica : here) {
    proto::FromNode message;
    *message.mutable_report() = describe(replica, since_last);
    coordinators_.send(message);
  }
}

proto::Report NodeServer::describe(ReplicaId replica, Duration since_last) {
  proto::Report report;
  report.set_replica(replica.value);
  report.set_node(options_.name);
  report.set_daemon(reports_as_);
  for (auto& [id, trainer] : trainers_) {
    if (!trainer.key || trainer.key->replica != replica) continue;
    if (auto found = progress_.find(*trainer.key); found != progress_.end() && trainer.catching_up) {
      auto& stream = *report.mutable_stream();
      const auto& one = found->second;
      stream.set_bytes(stream.bytes() + one.bytes);
      stream.set_total_bytes(stream.total_bytes() + one.total_bytes);
      stream.set_bytes_per_second(stream.bytes_per_second() + one.bytes_per_second);
      stream.set_slices(stream.slices() + one.total_slices);
      stream.set_verified(stream.verified() + one.verified);
      stream.set_refetched(stream.refetched() + one.refetched);
      stream.set_sources(std::max(stream.sources(), static_cast<std::uint32_t>(one.sources_used)));
      stream.set_from_joiners(stream.from_joiners() + one.from_joiners);
      report.set_passed_on(report.passed_on() + one.passed_on);
      if (!one.unreached.empty() && report.unreached().empty())
        report.set_unreached(fmt::format("rank {}: {}", trainer.key->rank, one.unreached));
    }
    if (const auto* stream = trainer.own ? trainer.own.get() : host_.get(); trainer.catching_up)
      if (const auto why = why_stream_stands(*stream); !why.empty())
        report.set_unreached(fmt::format("rank {}: {}", trainer.key->rank, why));
    const auto before = std::exchange(trainer.reported, trainer.ring);
    for (const auto& hop : trainer.ring.hops()) {
      if (hop.recent_gap_us() == 0 || hop.recent_gap_us() < report.slowest().gap_us()) continue;
      const auto same = std::ranges::find(before.hops(), hop.replica(), [](const auto& one) { return one.replica(); });
      const auto bytes = hop.bytes() - (same == before.hops().end() ? 0 : std::min(same->bytes(), hop.bytes()));
      auto& slowest = *report.mutable_slowest();
      slowest.set_rank(trainer.key->rank.value);
      slowest.set_from(hop.replica());
      slowest.set_gap_us(hop.recent_gap_us());
      slowest.set_bytes_per_second(static_cast<std::uint64_t>(static_cast<double>(bytes) / seconds(since_last)));
    }
    for (int i = 0; i < trainer.ring.rails_size(); ++i) {
      auto& sum = i < report.rails_size() ? *report.mutable_rails(i) : *report.add_rails();
      sum.set_peers(sum.peers() + trainer.ring.rails(i).peers());
      sum.set_up(sum.up() + trainer.ring.rails(i).up());
    }
  }
  return report;
}

}  // namespace rejoin::daemon
