// What `rejoin doctor` makes of its pairs: each way between this node and another one.
#include <algorithm>
#include <cmath>

#include "base/fail.h"
#include "daemon/doctor.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;
using Reached = PathFacts::Reached;

namespace {

// What is wrong with a way that is connected.
std::string how_far(const PathFacts& path) {
  switch (path.reached) {
    case Reached::small: return "64 B ok, 1 MiB: " + path.why;
    case Reached::sent: return "64 B ok, 1 MiB arrives, and does not come back: " + path.why;
    default: return path.why;
  }
}

std::string remedy_for(const PathFacts& path, const std::string& node) {
  if (path.reached == Reached::small || path.reached == Reached::sent)
    return fmt::format(
        "MTU or PFC on the path: the same MTU on all interfaces and switches between the two ('ping -M do -s SIZE {}' "
        "finds the largest that passes); RoCE: PFC or ECN on every hop",
        node.substr(0, node.rfind(':')));
  return "look at the routes between these two addresses, and at firewalls";
}

struct Pair {
  const PairFacts& facts;
  const std::string& own;
  Findings& findings;
  const PathFacts* best = nullptr;

  void say(Verdict verdict, std::string found, std::string remedy) const {
    findings.push_back({verdict, "pair", facts.node + ": " + std::move(found), std::move(remedy)});
  }
  static std::string port_of(const std::string& node) { return node.substr(node.rfind(':') + 1); }

  void examine() {
    for (const auto& path : facts.paths)
      if (best == nullptr || path.reached > best->reached) best = &path;
    if (best == nullptr) return;
    if (best->reached == Reached::nothing) not_reached();
    else reached();
    examine_clock(facts.node, facts.clock_ahead_ms, facts.clock_error_ms, findings);
  }

  void not_reached() const {
    if (!facts.came)
      return say(Verdict::fail, fmt::format("it is not reached from here, and has not come: {}", best->why),
                 fmt::format("run the same command there within --wait-s; let the firewalls of both pass port {}",
                             port_of(facts.node)));
    say(Verdict::fail, fmt::format("it reaches this node, and is not reached from here: {}", best->why),
        fmt::format("let its firewall pass port {}, and look at the route from here to there", port_of(facts.node)));
  }

  // As it says itself.
  void their_verdict(const PathFacts& way) const {
    if (way.reached == Reached::nothing)
      say(Verdict::fail, fmt::format("it is reached from here, and does not reach this node at {}: {}", own, way.why),
          fmt::format("let this node's firewall pass port {}, and look at the route from there to here; behind a "
                      "translation of addresses name the one that others see",
                      port_of(own)));
    else if (way.reached != Reached::all && best->reached == Reached::all)
      say(Verdict::fail, fmt::format("its way to this node: {}", how_far(way)), remedy_for(way, facts.node));
  }

  void reached() const {
    if (facts.verdict) their_verdict(*facts.verdict);
    else if (best->reached > Reached::connected)
      say(Verdict::warn, "it is reached, and does not say whether it reaches this node",
          "look at what 'rejoin doctor' says there");
    const auto bad = [](const auto& path) { return path.reached != Reached::all; };
    if (std::ranges::none_of(facts.paths, bad)) all_reached();
    else if (!rail_only()) some_reached();
    for (const auto& path : facts.paths)
      if (path.mtu != 0 && path.mtu_there != 0 && path.mtu != path.mtu_there)
        return say(Verdict::warn,
                   fmt::format("packets of {} bytes here ({}), and of {} there ({})", path.mtu, path.here,
                               path.mtu_there, path.there),
                   "give all nodes' interfaces and the switches one MTU");
  }

  void all_reached() const {
    double small = 0, large = 0;
    for (const auto& path : facts.paths) small = std::max(small, path.small_ms), large = std::max(large, path.large_ms);
    say(Verdict::ok,
        fmt::format("64 B there and back in {:.2f} ms, 1 MiB in {:.1f} ms{}", small, large,
                    facts.paths.size() > 1 ? fmt::format(" at most, on each of {} ways", facts.paths.size()) : ""),
        "");
  }

  // Traffic goes from a rail to the one of the same number.
  bool rail_only() const {
    const auto only = [](const auto& path) {
      return path.own == path.theirs ? path.reached == Reached::all : path.reached == Reached::nothing;
    };
    if (!std::ranges::all_of(facts.paths, only)) return false;
    say(Verdict::ok, "each rail reaches the one of the same number, and no other (a rail-only fabric), which suffices",
        "name the rails in the same order on all nodes");
    return true;
  }

  void some_reached() const {
    for (const auto& path : facts.paths) {
      if (path.reached == Reached::all) continue;
      const std::string there = path.there.empty() ? fmt::format("its rail {}", path.theirs + 1) : path.there;
      say(path.own == path.theirs ? Verdict::fail : Verdict::warn,
          facts.paths.size() == 1 ? how_far(path) : fmt::format("from {} to {}: {}", path.here, there, how_far(path)),
          remedy_for(path, facts.node));
    }
  }
};

}  // namespace

void examine_clock(const std::string& whose, std::optional<double> ahead_ms, double error_ms, Findings& findings) {
  constexpr double far = 1000, ms_per_s = 1000;
  if (!ahead_ms) return;
  const char* which = *ahead_ms > 0 ? "ahead of" : "behind";
  if (std::abs(*ahead_ms) - error_ms <= far)
    return findings.push_back({Verdict::ok, "clock",
                               fmt::format("{}: its clock is {:.1f} ms {} this node's, give or take {:.2f}", whose,
                                           std::abs(*ahead_ms), which, error_ms),
                               ""});
  findings.push_back({Verdict::warn, "clock",
                      fmt::format("{}: its clock is {:.1f} s {} this node's: certificates may be taken for expired or "
                                  "not yet valid, and times in logs don't match",
                                  whose, std::abs(*ahead_ms) / ms_per_s, which),
                      "run chrony or systemd-timesyncd on all nodes: 'timedatectl' tells whether this one's clock is "
                      "synchronized"});
}

void examine_pairs(const DoctorSettings& s, const Probes& probes, const std::optional<JobKeys>& keys,
                   Findings& findings) {
  if (s.pairs.empty()) return findings.push_back({Verdict::skipped, "pair", "no --pairs", ""});
  if (!keys) return findings.push_back({Verdict::skipped, "pair", "there is no key to show", ""});
  const auto facts = probes.pairs(*keys);
  if (!facts) return findings.push_back(failed("pair", facts.error(), "give all nodes the same --pairs"));
  for (const auto& one : facts->others) Pair{one, facts->own, findings}.examine();
  if (facts->others.empty())
    findings.push_back({Verdict::warn, "pair", "there is no other node in --pairs", "name all nodes of the job"});
}

}  // namespace rejoin::daemon
