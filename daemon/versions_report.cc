#include "daemon/versions_report.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/log.h"
#include "base/release.h"

namespace rejoin::daemon {

namespace {

using nlohmann::json;

// Processes that speak the same: how many, and some of them.
struct Group {
  std::size_t count = 0;
  json some = json::array();
  void add(const auto& name) {
    constexpr std::size_t most = 4;
    if (++count <= most) some.push_back(name());
  }
};

// Of an orderly job there are few.
template <typename Groups>
Groups& first_of(Groups& groups) {
  constexpr std::size_t most = 32;
  while (groups.size() > most) groups.erase(std::prev(groups.end()));
  return groups;
}

std::string text_of(const json& group, const char* one, const char* several) {
  const auto count = group.at("count").get<std::size_t>();
  const auto release = group.at("release").get<std::string>(), daemon = group.value("daemon_release", release);
  std::string text = fmt::format("{} {} {} {}", count, count == 1 ? one : several, count == 1 ? "speaks" : "speak",
                                 group.at("protocol").get<std::uint32_t>());
  const auto known = [](const std::string& of) { return of.empty() ? std::string("an older release") : of; };
  text += daemon == release ? fmt::format(" ({}", known(release))
                            : fmt::format(" ({} under daemons of {}", known(release), known(daemon));
  std::string some;
  for (const auto& name : group.at("some")) some += (some.empty() ? ": " : ", ") + name.get<std::string>();
  return text + some + (group.at("some").size() < count ? ", …)" : ")");
}

}  // namespace

json versions_of(const membership::Coordinator& machine) {
  std::map<std::tuple<std::uint32_t, std::string>, Group> nodes;
  std::map<const membership::RankVersions*, Group> ranks;  // the coordinator has each once
  const membership::Spoken own(membership::kProtocolVersion);
  const std::uint32_t of_coordinators = machine.protocol_of_coordinators().value_or(own).version();
  std::set<std::uint32_t> protocols{own.version(), of_coordinators};
  std::set<std::string> releases{release()};
  for (const auto& entry : machine.nodes()) {
    const membership::ConnectedNode& node = entry.second;
    if (node.name.empty()) continue;  // it has not introduced itself
    nodes[{node.spoken.version(), node.release}].add([&] { return node.name; });
    protocols.insert(node.spoken.version());
    releases.insert(node.release);
  }
  for (const auto& [id, replica] : machine.replicas())
    for (std::size_t i = 0; i < replica.ranks.size(); ++i) {
      const auto& rank = replica.ranks[i];
      if (!rank.registered) continue;
      ranks[&machine.versions_of(rank)].add([&, place = id] { return fmt::format("{}.{}", place, i); });
    }
  std::map<std::tuple<std::uint32_t, std::string, std::string>, Group> by_name;
  for (auto& [of, group] : ranks) {
    protocols.insert(of->spoken.version());
    releases.insert({of->release, of->of_daemon});
    by_name[{of->spoken.version(), of->release, of->of_daemon}] = std::move(group);
  }
  json versions{{"protocol", machine.protocol().version()},
                {"mixed", protocols.size() > 1 || releases.size() > 1},
                {"oldest", membership::kOldestProtocol},
                {"newest", membership::kProtocolVersion},
                {"coordinators", of_coordinators},
                {"release", release()},
                {"nodes", json::array()},
                {"ranks", json::array()}};
  for (auto& [of, group] : first_of(nodes))
    versions["nodes"].push_back({{"protocol", std::get<0>(of)},
                                 {"release", std::get<1>(of)},
                                 {"count", group.count},
                                 {"some", std::move(group.some)}});
  for (auto& [of, group] : first_of(by_name))
    versions["ranks"].push_back({{"protocol", std::get<0>(of)},
                                 {"release", std::get<1>(of)},
                                 {"daemon_release", std::get<2>(of)},
                                 {"count", group.count},
                                 {"some", std::move(group.some)}});
  return versions;
}

std::string versions_line(const json& versions) {
  const auto newest = versions.at("newest").get<std::uint32_t>();
  const auto release = versions.at("release").get<std::string>();
  if (!versions.at("mixed").get<bool>())
    return fmt::format("all are of release {} and speak protocol {}", release, newest);
  std::string text = fmt::format("MIXED: all members speak protocol {}, this coordinator {} ({})",
                                 versions.at("protocol").get<std::uint32_t>(), newest, release);
  if (const auto lowest = versions.at("coordinators").get<std::uint32_t>(); lowest != newest)
    text += fmt::format("; another coordinator speaks {}", lowest);
  for (const auto& group : versions.at("nodes")) text += "; " + text_of(group, "node", "nodes");
  for (const auto& group : versions.at("ranks")) text += "; " + text_of(group, "rank", "ranks");
  return text;
}

void VersionsLog::look_at(const membership::Coordinator& machine, TimePoint now) {
  if (!due_.may_say(now)) return;
  const json versions = versions_of(machine);
  if (versions.at("nodes").empty()) return;
  // Ever the same groups: how many are in each changes with each process that is started again.
  std::string key = versions.at("mixed").dump();
  for (const char* of : {"nodes", "ranks"})
    for (const auto& group : versions.at(of))
      key += fmt::format(" {}/{}/{}", group.at("protocol").dump(), group.at("release").dump(),
                         group.value("daemon_release", ""));
  if (std::exchange(reported_, key) != key) spdlog::info("versions: {}", versions_line(versions));
}

}  // namespace rejoin::daemon
