// What the node tells of itself (/status).
#include <signal.h>

#include <nlohmann/json.hpp>

#include "daemon/node_server.h"

namespace rejoin::daemon {

nlohmann::json NodeServer::status() const {
  std::vector<const DeviceStream*> streams{host_.get()};
  for (const auto& [id, trainer] : trainers_)
    if (trainer.own) streams.push_back(trainer.own.get());
  std::uint64_t bytes_served = served_by_gone_;
  for (const auto* stream : streams) bytes_served += stream->bytes_served;
  nlohmann::json json{{"node", options_.name},
                      {"coordinator", coordinators_.status(machine_.coordinator_up())},
                      {"epoch", machine_.plan().epoch()},
                      {"committed", machine_.plan().committed()},
                      {"bytes_served", bytes_served},
                      {"rejected", rejected_}};
  json["ranks"] = nlohmann::json::array();
  for (const auto& [id, trainer] : trainers_) {
    if (!trainer.key) continue;
    auto info = machine_.ranks().find(id);
    nlohmann::json rank{{"replica", trainer.key->replica.value},
                        {"rank", trainer.key->rank.value},
                        {"pid", trainer.credentials.pid},
                        {"role", trainer.catching_up ? "catching_up" : "contributor"}};
    if (info != machine_.ranks().end()) {
      rank["incarnation"] = info->second.up.incarnation();
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
                          {"sources", progress->second.sources}};
    rank["all_reduce"] = {{"operations", trainer.ring.operations()},
                          {"bytes", trainer.ring.bytes_reduced()},
                          {"stale_dropped", trainer.ring.stale_dropped()}};
    rank["hops"] = nlohmann::json::array();
    for (const auto& hop : trainer.ring.hops())
      rank["hops"].push_back({{"replica", hop.replica()},
                              {"chunks", hop.chunks()},
                              {"bytes", hop.bytes()},
                              {"longest_gap_us", hop.longest_gap_us()}});
    json["ranks"].push_back(std::move(rank));
  }
  json["gone"] = nlohmann::json::array();
  for (const auto& [key, gone] : gone_)
    json["gone"].push_back({{"replica", key.replica.value},
                            {"rank", key.rank.value},
                            {"pid", gone.pid},
                            {"lives", gone.pid > 0 && ::kill(gone.pid, 0) == 0},
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
                                 {"zstd", stats.coding},
                                 {"link_bytes_per_second", stats.link_bytes_per_second},
                                 {"coder_bytes_per_second", stats.coder_bytes_per_second},
                                 {"coded_ratio", stats.ratio}});
  return json;
}

}  // namespace rejoin::daemon
