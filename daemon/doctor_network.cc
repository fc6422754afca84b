// What `rejoin doctor` makes of the coordinators, of what others are told, and of peers.
#include <algorithm>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/doctor.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

namespace {

void examine_coordinator(const DoctorSettings& s, const CoordinatorFacts& one, bool another_answers,
                         Findings& findings) {
  const auto say = [&](Verdict verdict, std::string found, std::string remedy) {
    findings.push_back({verdict, "coordinator", one.address + ": " + std::move(found), std::move(remedy)});
  };
  if (one.answered && one.stalled)
    return say(Verdict::warn, "it leads, and its store does not take what it decides", "see to etcd");
  if (one.answered)
    return say(
        Verdict::ok,
        fmt::format("the key is right, and it answers in protocol {} after {:.1f} ms{}", one.protocol, one.milliseconds,
                    one.one_of_several
                        ? one.leads ? fmt::format("; it leads in term {}", one.term) : std::string("; it stands by")
                        : ""),
        "");
  if (one.refused) {
    const auto border = one.why.find("; ");
    return say(Verdict::fail, one.why.substr(0, border),
               border == std::string::npos ? "look at its log" : one.why.substr(border + 2));
  }
  if (one.proven) {
    const auto [why, remedy] = split_at_upgrade(one.why.empty() ? "says nothing" : one.why);
    return say(Verdict::fail, "it shows the key, and " + why, remedy);
  }
  // Others may do without it.
  say(another_answers ? Verdict::warn : Verdict::fail,
      one.why.empty() ? fmt::format("no answer in {} ms", s.patience.count())
                      : one.why.substr(0, one.why.find("; --connect takes")),
      "start the coordinator, give --connect its --listen address (not its --status), and let firewalls pass its port");
}

void examine_coordinators(const DoctorSettings& s, const std::vector<CoordinatorFacts>& all, Findings& findings) {
  const auto answers = [](const auto& one) { return one.answered; };
  for (const auto& one : all) {
    examine_coordinator(s, one, std::ranges::any_of(all, answers), findings);
    examine_clock(one.address, one.clock_ahead_ms, one.clock_error_ms, findings);
  }
  const bool several = std::ranges::any_of(all, [](const auto& one) { return one.answered && one.one_of_several; });
  if (!several || std::ranges::any_of(all, [](const auto& one) { return one.leads; })) return;
  const auto knows = std::ranges::find_if(all, [](const auto& one) { return !one.leader.empty(); });
  if (knows != all.end())
    findings.push_back({Verdict::warn, "coordinator",
                        fmt::format("none of them leads; {} says that {} does, in term {}", knows->address,
                                    knows->leader, knows->term),
                        "add that one to --connect where it is missing; otherwise look at it, and at etcd"});
  else
    findings.push_back(
        {Verdict::warn, "coordinator", "none of them leads", "look at the coordinators' status, and at etcd"});
}

// What other nodes are told of this one's catch-up stream, as the daemon makes it of its settings.
void examine_advertised(const DoctorSettings& s, const Probes& probes, bool remote, Findings& findings) {
  const auto say = [&](Verdict verdict, std::string found, std::string remedy) {
    findings.push_back({verdict, "advertised", std::move(found), std::move(remedy)});
  };
  if (s.transport == "shm") {
    if (remote)
      return say(Verdict::fail,
                 "a coordinator is on another machine, and replicas of other machines can't catch up over shm",
                 "--transport tcp, ibverbs or ucx, the same on all nodes");
    return say(Verdict::skipped, "over shm there is no address", "");
  }
  const auto listening = transport::SocketAddress::split(s.data_listen);
  if (!listening) return findings.push_back(failed("advertised", listening.error(), "give --data-listen HOST:PORT"));
  const std::string first = split(s.coordinators, ',').front();
  const bool everywhere = listening->host == "0.0.0.0" || listening->host == "::";
  const std::string known = probes.own_host_towards(first);
  const auto hosts = !s.advertise.empty() ? split(s.advertise, ',') : std::vector{everywhere ? known : listening->host};
  bool all_right = true;
  for (const auto& host : hosts) {
    const auto facts = probes.host(host);
    all_right = false;
    if (!facts.unresolved.empty())
      say(Verdict::fail, fmt::format("{}: {}", host, facts.unresolved), "give --advertise an address, or see to DNS");
    else if (facts.loopback && remote)
      say(Verdict::fail, fmt::format("{}: other nodes can't reach it, and a coordinator is on another machine", host),
          s.advertise.empty() && !everywhere ? fmt::format("--data-listen 0.0.0.0:{}", listening->port)
                                             : fmt::format("--advertise {}", known));
    else if (!facts.own)
      say(Verdict::warn, fmt::format("{} is no address of this machine", host),
          fmt::format("right where addresses are translated; otherwise --advertise {}", known));
    else all_right = true;
    if (!all_right) break;
  }
  const auto bound = probes.host(listening->host);
  if (all_right && remote && !everywhere && bound.loopback)
    return say(Verdict::fail,
               fmt::format("others are told {}, and the daemon listens on {} alone", s.advertise, listening->host),
               fmt::format("--data-listen 0.0.0.0:{}", listening->port));
  if (!all_right) return;
  if (listening->port == 0)
    return say(Verdict::ok, fmt::format("others are told {}, and a port that the system picks", fmt::join(hosts, ", ")),
               "where a firewall is between nodes, give it a port to let pass: --data-listen HOST:PORT");
  say(Verdict::ok, fmt::format("others are told {}, port {}", fmt::join(hosts, ", "), listening->port), "");
}

}  // namespace

void examine_network(const DoctorSettings& s, const Probes& probes, const std::optional<JobKeys>& keys,
                     Findings& findings) {
  bool remote = false;
  if (s.coordinators.empty()) findings.push_back({Verdict::skipped, "coordinator", "no --connect", ""});
  else if (!keys) findings.push_back({Verdict::skipped, "coordinator", "there is no key to show", ""});
  else {
    const auto all = probes.coordinators(s.coordinators, *keys);
    examine_coordinators(s, all, findings);
    remote = std::ranges::any_of(all, [](const auto& one) { return one.remote; });
  }
  if (s.coordinators.empty() || !keys)
    findings.push_back({Verdict::skipped, "advertised", "nobody to be told an address: no coordinator was tried", ""});
  else examine_advertised(s, probes, remote, findings);
  if (s.peers.empty()) findings.push_back({Verdict::skipped, "peer", "no --peer", ""});
  for (const auto& peer : s.peers) {
    if (!keys) {
      findings.push_back({Verdict::skipped, "peer", fmt::format("{}: there is no key to show", peer), ""});
    } else if (const auto connected = probes.peer(peer, *keys); !connected) {
      const auto& error = connected.error();
      auto finding = error.code == ErrorCode::invalid_argument
                         ? failed("peer", error, "give --transport what this node has")
                         : Finding{Verdict::fail, "peer", error.message,
                                   "start its rejoind with this --transport and job key; its --data-listen must be "
                                   "reachable from here, and firewalls pass its port"};
      finding.found = peer + ": " + finding.found;
      findings.push_back(std::move(finding));
    } else {
      findings.push_back({Verdict::ok, "peer", fmt::format("{}: connects, and its key is right", peer), ""});
    }
  }
}

}  // namespace rejoin::daemon
