// What `rejoin doctor` makes of the coordinators, of what others are told, and of peers.
#include <algorithm>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/doctor.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

namespace {

// `among`: how many addresses there are; `another_answers`: at one of them somebody does.
void examine_coordinator(const DoctorSettings& s, const CoordinatorFacts& one, std::size_t among, bool another_answers,
                         Findings& findings) {
  const auto say = [&](Verdict verdict, std::string found, std::string remedy) {
    findings.push_back({verdict, "coordinator", one.address + ": " + std::move(found), std::move(remedy)});
  };
  if (one.answered && one.stalled)
    return say(Verdict::warn, "it leads, and its store does not take what it decides", "see to etcd");
  if (one.answered && !one.one_of_several && among > 1)
    return say(Verdict::fail,
               "it decides alone (--store file), and of several only those are followed that share a store",
               "--connect takes its address only, or give it the --store of the others");
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
    examine_coordinator(s, one, all.size(), std::ranges::any_of(all, answers), findings);
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

struct Fault {
  Verdict verdict{};
  std::string found, remedy;
};

struct Listener {
  transport::HostPort at;
  HostFacts facts;
  bool everywhere = false;
  std::string known;  // an address that it can be told by; empty: there is none
};

std::string families_of(const HostFacts& facts) { return facts.v4 ? facts.v6 ? "IPv4 and IPv6" : "IPv4" : "IPv6"; }

// Why others do not find what listens there at `host`, and what to do; nothing where they do.
std::optional<Fault> fault_of(const std::string& host, const HostFacts& facts, const Listener& listener,
                              const std::string& advertise, bool remote) {
  const std::string know = listener.known.empty() ? "an address of this machine" : listener.known;
  if (!facts.unresolved.empty())
    return Fault{Verdict::fail, fmt::format("{}: {}", host, facts.unresolved),
                 "give --advertise an address, or see to DNS"};
  if (facts.loopback && remote)
    return Fault{Verdict::fail,
                 fmt::format("{}: other nodes can't reach it, and a coordinator is on another machine", host),
                 advertise.empty() && !listener.everywhere ? fmt::format("--data-listen 0.0.0.0:{}", listener.at.port)
                                                           : fmt::format("--advertise {}", know)};
  const bool v4 = listener.facts.v4 || listener.at.host == "::";
  if (facts.own && !(facts.v4 && v4) && !(facts.v6 && listener.facts.v6))
    return Fault{
        Verdict::fail,
        fmt::format("others are told {}, over {} alone, and the daemon listens on {}, over {} alone", host,
                    families_of(facts), listener.at.host, families_of(listener.facts)),
        fmt::format("--data-listen [::]:{}, which listens over both, or --advertise {}", listener.at.port, know)};
  if (facts.link_local)
    return Fault{
        Verdict::warn,
        fmt::format("{}: a link-local address, of use where the others' interface has the same name alone", host),
        fmt::format("--advertise {}", know)};
  if (facts.own) return std::nullopt;
  return Fault{Verdict::warn, fmt::format("{} is no address of this machine", host),
               fmt::format("right where addresses are translated; otherwise --advertise {}", know)};
}

// What other nodes are told of this one's catch-up stream, as the daemon makes it of its settings. `towards`: a
// coordinator.
void examine_advertised(const DoctorSettings& s, const Probes& probes, const std::string& towards, bool remote,
                        Findings& findings) {
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
  Listener listener{.at = *listening,
                    .facts = probes.host(listening->host),
                    .everywhere = transport::listens_everywhere({s.data_listen})};
  const auto own =
      remote ? probes.own_hosts_towards(towards) : transport::or_loopback(probes.own_hosts_towards(towards));
  const auto told = transport::with_own_host_for_any({listener.everywhere ? s.data_listen : "[::]:1"}, own);
  if (!transport::listens_everywhere(told)) listener.known = transport::SocketAddress::split(told.text)->host;
  if (s.advertise.empty() && listener.everywhere && listener.known.empty())
    return say(Verdict::fail,
               fmt::format("the daemon listens on {}{}, and this machine has no {}address that others could be told",
                           listening->host, own.v6.empty() ? "" : ", over IPv4 alone", own.v6.empty() ? "" : "IPv4 "),
               fmt::format("{}--advertise with an address that others reach",
                           own.v6.empty() ? "" : fmt::format("--data-listen [::]:{}, or ", listening->port)));
  const auto hosts = !s.advertise.empty() ? split(s.advertise, ',')
                                          : std::vector{listener.everywhere ? listener.known : listening->host};
  for (const auto& host : hosts)
    if (auto fault = fault_of(host, probes.host(host), listener, s.advertise, remote))
      return say(fault->verdict, std::move(fault->found), std::move(fault->remedy));
  if (remote && !listener.everywhere && listener.facts.loopback)
    return say(Verdict::fail,
               fmt::format("others are told {}, and the daemon listens on {} alone", s.advertise, listening->host),
               fmt::format("--data-listen 0.0.0.0:{}", listening->port));
  if (listening->port == 0)
    return say(Verdict::ok, fmt::format("others are told {}, and a port that the system picks", fmt::join(hosts, ", ")),
               "where a firewall is between nodes, give it a port to let pass: --data-listen HOST:PORT");
  say(Verdict::ok, fmt::format("others are told {}, port {}", fmt::join(hosts, ", "), listening->port), "");
}

}  // namespace

void examine_network(const DoctorSettings& s, const Probes& probes, const std::optional<JobKeys>& keys,
                     Findings& findings) {
  bool remote = false;
  std::string towards;
  if (s.coordinators.empty()) findings.push_back({Verdict::skipped, "coordinator", "no --connect", ""});
  else if (!keys) findings.push_back({Verdict::skipped, "coordinator", "there is no key to show", ""});
  else {
    const auto all = probes.coordinators(s.coordinators, *keys);
    examine_coordinators(s, all, findings);
    remote = std::ranges::any_of(all, [](const auto& one) { return one.remote; });
    const auto answers = std::ranges::find_if(all, [](const auto& one) { return one.answered; });
    if (!all.empty()) towards = (answers == all.end() ? all.front() : *answers).address;
  }
  if (s.coordinators.empty() || !keys)
    findings.push_back({Verdict::skipped, "advertised", "nobody to be told an address: no coordinator was tried", ""});
  else examine_advertised(s, probes, towards, remote, findings);
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
