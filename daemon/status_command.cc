#include "daemon/status_command.h"

#include <unistd.h>

#include <asio.hpp>
#include <atomic>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/start_thread.h"
#include "daemon/status_fetch.h"
#include "daemon/versions_report.h"

namespace rejoin::daemon {
namespace {

// A replica that the job runs without. A standby has read of it, and does not know since when.
std::string outage_line(const nlohmann::json& out, bool leads) {
  const std::string next = out.at("next").get<std::string>();
  return fmt::format("OUT replica {}{}: {}{}{}", out.at("replica").get<int>(),
                     out.contains("for_ms") ? fmt::format(" for {:.1f} s", out.at("for_ms").get<double>() * 1e-3)
                     : leads                ? " since before the coordinator was started, or took the lead"
                                            : "",
                     out.at("reason").get<std::string>(), next.empty() ? "" : "; ", next);
}

std::string straggler_line(const nlohmann::json& one) {
  const auto since = fmt::format("for {:.1f} s, since step {}", one.at("for_ms").get<double>() * 1e-3,
                                 one.at("since_step").get<std::uint64_t>());
  if (one.at("what") == "compute")
    return fmt::format("SLOW replica {}: it computes {:.2f} times as long for a sample as the median replica, {}",
                       one.at("replica").get<int>(), one.at("times").get<double>(), since);
  if (one.at("what") == "link") {
    const auto about = [&](const char* key) {
      const auto below = one.at(key).get<std::uint64_t>();
      return fmt::format("{} to {} MB/s", below / 2, below);
    };
    return fmt::format("SLOW link from replica {} to replica {} rank {}: {}, the median link {}, {}",
                       one.at("from").get<int>(), one.at("replica").get<int>(), one.at("rank").get<int>(),
                       about("below_mb_per_second"), about("usual_below_mb_per_second"), since);
  }
  return fmt::format("SLOW hop from replica {} to replica {} rank {}: gaps of up to {:.1f} ms, of others {:.1f} ms, {}",
                     one.at("from").get<int>(), one.at("replica").get<int>(), one.at("rank").get<int>(),
                     one.at("gap_us").get<double>() * 1e-3, one.at("usual_us").get<double>() * 1e-3, since);
}

std::string connection(const nlohmann::json& coordinator) {
  const auto address = coordinator.at("address").get<std::string>(), why = coordinator.at("reason").get<std::string>();
  if (coordinator.at("connected").get<bool>()) return address + " connected";
  return fmt::format("{} NOT CONNECTED{}{}", address, why.empty() ? "" : ": ", why);
}

// Those of several coordinators, or the only one, that are not as they should be.
void print_odd_coordinators(const nlohmann::json& coordinator) {
  const bool led = coordinator.at("connected").get<bool>();  // otherwise it is said why none is reached
  for (const auto& one : coordinator.value("all", nlohmann::json::array({coordinator}))) {
    const auto why = one.at("reason").get<std::string>();
    const bool connected = one.at("connected").get<bool>();
    if ((connected || led) && !why.empty())
      std::cout << fmt::format("  WARNING coordinator {}{}: {}\n", one.at("address").get<std::string>(),
                               connected ? "" : " NOT CONNECTED", why);
  }
}

// Who of several coordinators leads, and how long it takes to keep what is decided.
std::string store_lines(const nlohmann::json& store, bool has_nodes) {
  const auto& writes = store.at("write_us");
  const auto milli = [&](const char* which) { return writes.at(which).get<double>() * 1e-3; };
  const auto kind = store.at("kind").get<std::string>();
  const std::string times = writes.at("count").get<std::uint64_t>() == 0
                                ? ""
                                : fmt::format("; its {} takes {:.2f} ms for what is decided, at most {:.1f} ms",
                                              kind == "file" ? "disk" : kind, milli("mean"), milli("longest"));
  if (kind == "file") return times.empty() ? "" : fmt::format("  it decides alone{}\n", times);
  const auto& leader = store.at("leader");
  const auto term = store.at("term").get<std::uint64_t>();
  const std::string for_so_long = leader.value("for_ms", std::uint64_t{0}) > 0
                                      ? fmt::format(" for {:.0f} s", leader.at("for_ms").get<double>() * 1e-3)
                                      : "";
  std::string lines;
  if (store.at("leads").get<bool>())
    lines = fmt::format("  leads in term {}{}, with its decisions in {}{}\n", term, for_so_long, kind, times);
  else if (term == 0) lines = "  STANDBY: none has led yet\n";
  else if (leader.at("address").get<std::string>().empty())
    lines = "  STANDBY: nobody leads since decisions were imported into the store; it is about to take the lead\n";
  else if (const double no_sign = store.value("no_sign_ms", 0.0); no_sign > 0)
    lines = fmt::format(
        "  STANDBY: {} at {} led in term {}; {} has shown no sign of it for {:.0f} s{}; {} decisions are known here\n",
        leader.at("name").get<std::string>(), leader.at("address").get<std::string>(), term, kind, no_sign * 1e-3,
        has_nodes ? "" : ", and no daemon is connected here that could say whether it leads",
        store.at("position").get<std::uint64_t>());
  else
    lines = fmt::format("  STANDBY: {} at {} leads in term {}{}; {} decisions are known here\n",
                        leader.at("name").get<std::string>(), leader.at("address").get<std::string>(), term,
                        for_so_long, store.at("position").get<std::uint64_t>());
  if (const auto why = store.at("failing").get<std::string>(); store.at("stalled").get<bool>() || !why.empty())
    lines += fmt::format("  {}: {} has not answered for {:.1f} s{}{}\n",
                         store.at("stalled").get<bool>() ? "STALLED" : "WARNING", kind,
                         store.at("failing_ms").get<double>() * 1e-3, why.empty() ? "" : ": ", why);
  return lines;
}

// What was measured, where it makes a difference. The coordinator names those that lie in others first.
std::string neighbourhood_line(const nlohmann::json& coordinator) {
  std::string all;
  for (const auto& one : coordinator.value("neighbourhoods", nlohmann::json::array())) {
    all += all.empty() ? "" : " |";
    for (const auto& replica : one) all += fmt::format(" {}", replica.get<int>());
  }
  if (all.empty()) return "";
  const bool followed = coordinator.value("orders_by_round_trips", true);
  return fmt::format("  near each other, by round trips{}:{}\n", followed ? "" : ", which no order follows", all);
}

// "<0.26 to <2.05": in ms, to the nearest and the farthest of those that it is connected with.
std::string round_trips_of(const nlohmann::json& member) {
  if (!member.contains("round_trip_us")) return "";
  const auto& us = member.at("round_trip_us");
  return fmt::format("<{:.2f} to <{:.2f}", us.at("nearest").get<double>() * 1e-3,
                     us.at("farthest").get<double>() * 1e-3);
}

// An older coordinator does not say it.
std::string samples_of(const nlohmann::json& member) {
  return member.contains("samples") ? std::to_string(member.at("samples").get<std::uint64_t>()) : "-";
}

void print_roles(const nlohmann::json& status) {
  if (status.contains("coordinator_role")) {
    const auto& c = status.at("coordinator_role");
    std::cout << fmt::format("coordinator: epoch {}, step {} committed, {} nodes{}\n",
                             c.at("epoch").get<std::uint64_t>(), c.at("committed").get<std::uint64_t>(),
                             c.at("nodes").get<int>(), c.at("finished").get<bool>() ? ", finished" : "");
    std::cout << store_lines(c.at("store"), c.at("nodes").get<std::uint64_t>() > 0);
    // An older coordinator doesn't say it, nor does a standby.
    if (c.contains("versions")) std::cout << "  " << versions_line(c.at("versions")) << "\n";
    const bool located = std::ranges::any_of(c.at("members"), [](const auto& m) { return m.contains("location"); });
    const std::string near = neighbourhood_line(c);
    const bool far = !near.empty();
    std::cout << fmt::format("  {:<8} {:<12} {:<12} {:<8} {}{}{}\n", "replica", "incarnation", "role", "samples",
                             "ranks done with the step", far ? " round trips (ms)" : "", located ? " location" : "");
    for (const auto& m : c.at("members"))
      std::cout << fmt::format(
          "  {:<8} {:<12} {:<12} {:<8} {:<{}}{:<{}}{}\n", m.at("replica").get<int>(), m.at("incarnation").get<int>(),
          m.at("has_left").get<bool>() ? "has left" : m.at("role").get<std::string>(), samples_of(m),
          m.at("reduced").get<int>(), far || located ? 25 : 0, far ? round_trips_of(m) : "", far && located ? 17 : 0,
          m.value("location", std::string()));
    std::cout << near;
    for (const auto& out : c.at("out"))
      std::cout << "  " << outage_line(out, c.at("store").at("leads").get<bool>()) << "\n";
    for (const auto& one : c.value("stragglers", nlohmann::json::array()))
      std::cout << "  " << straggler_line(one) << "\n";
    const auto& audit = c.at("audit");
    const auto differences =
        audit.at("result_differences").get<std::uint64_t>() + audit.at("state_differences").get<std::uint64_t>();
    std::cout << fmt::format("  states are compared once in {} steps, {} times so far; {} differences{}\n",
                             audit.at("period").get<std::uint64_t>(), audit.at("rounds").get<std::uint64_t>(),
                             differences,
                             differences == 0 ? "" : ", the last: " + audit.at("last_difference").get<std::string>());
    if (!c.at("stopped").get<std::string>().empty())
      std::cout << "  STOPPED: " << c.at("stopped").get<std::string>() << "\n";
    for (const auto& refused : c.at("refused"))
      std::cout << fmt::format("  REFUSED replica {} rank {}: {}\n", refused.at("replica").get<int>(),
                               refused.at("rank").get<int>(), refused.at("reason").get<std::string>());
    for (const auto& line : c.at("alarms")) std::cout << "  WARNING " << line.get<std::string>() << "\n";
    for (const auto& line : c.at("waiting_for")) std::cout << "  waits for " << line.get<std::string>() << "\n";
  }
  if (status.contains("relay_role")) {
    const auto& r = status.at("relay_role");
    std::cout << fmt::format("relay: {} ranks of {} daemons, coordinator {}\n", r.at("ranks").get<std::uint64_t>(),
                             r.at("nodes").get<std::uint64_t>(), connection(r.at("coordinator")));
    print_odd_coordinators(r.at("coordinator"));
  }
  if (status.contains("node_role")) {
    const auto& n = status.at("node_role");
    std::cout << fmt::format("{}: epoch {}, step {} committed, coordinator {}, {} served to joiners\n",
                             n.at("node").get<std::string>(), n.at("epoch").get<std::uint64_t>(),
                             n.at("committed").get<std::uint64_t>(), connection(n.at("coordinator")),
                             human_bytes(n.at("bytes_served").get<std::uint64_t>()));
    print_odd_coordinators(n.at("coordinator"));
    for (const auto& line : n.value("standing", nlohmann::json::array()))
      std::cout << "  WARNING " << line.get<std::string>() << "\n";
    for (const auto& gone : n.at("gone"))
      std::cout << fmt::format(
          "  replica {} rank {}: gone for {:.1f} s: {}{}\n", gone.at("replica").get<int>(), gone.at("rank").get<int>(),
          gone.at("for_ms").get<double>() / 1e3, gone.at("reason").get<std::string>(),
          gone.at("lives").get<bool>() ? fmt::format("; process {} is still there", gone.at("pid").get<int>()) : "");
    for (const auto& r : n.at("ranks")) {
      std::cout << fmt::format("  replica {} rank {} pid {}: {}", r.at("replica").get<int>(), r.at("rank").get<int>(),
                               r.at("pid").get<int>(), r.at("role").get<std::string>());
      if (r.contains("protocol") && r.at("protocol") != n.at("protocol"))
        std::cout << fmt::format(", speaks protocol {}", r.at("protocol").get<std::uint32_t>());
      if (r.contains("catch_up")) {
        const auto& c = r.at("catch_up");
        std::cout << fmt::format(
            ", {} of {} at {:.0f} MB/s from {} sources and {} joiners, {} of {} slices verified, {} fetched again",
            human_bytes(c.at("bytes").get<std::uint64_t>()), human_bytes(c.at("total_bytes").get<std::uint64_t>()),
            c.at("bytes_per_second").get<double>() * 1e-6, c.at("sources").get<int>(), c.value("joiners", 0),
            c.at("verified").get<int>(), c.at("slices").get<int>(), c.at("refetched").get<int>());
      }
      std::cout << "\n";
      if (const auto why = r.value("catch_up", nlohmann::json::object()).value("unreached", ""); !why.empty())
        std::cout << "    WARNING " << why << "\n";
      const auto& reduced = r.at("all_reduce");
      if (reduced.at("operations").get<std::uint64_t>() == 0) continue;
      std::cout << fmt::format(
          "    {} all-reduces of {}, {} stale messages dropped\n", reduced.at("operations").get<std::uint64_t>(),
          human_bytes(reduced.at("bytes").get<std::uint64_t>()), reduced.at("stale_dropped").get<std::uint64_t>());
      if (r.contains("coding")) {
        const auto& c = r.at("coding");
        std::cout << fmt::format(
            "    coding: sent {} as {}, {}, {} to make up for it\n",
            human_bytes(c.at("plain_bytes").get<std::uint64_t>()), human_bytes(c.at("sent_bytes").get<std::uint64_t>()),
            c.contains("error") ? fmt::format("{:.2g} % is lost in a step", 100 * c.at("error").get<double>())
                                : "nothing is lost so far",
            human_bytes(c.at("feedback_bytes").get<std::uint64_t>()));
      }
      for (const auto& hop : r.at("hops")) {
        if (hop.at("chunks").get<std::uint64_t>() == 0) {
          std::cout << fmt::format(
              "    from replica {}: nothing in chunks: no neighbour in the ring, or all buckets small and exchanged "
              "whole\n",
              hop.at("replica").get<int>());
          continue;
        }
        const auto bits = hop.value("coded_bits", 0u);
        std::cout << fmt::format("    from replica {}: {} in {} chunks, longest gap {:.1f} ms{}\n",
                                 hop.at("replica").get<int>(), human_bytes(hop.at("bytes").get<std::uint64_t>()),
                                 hop.at("chunks").get<std::uint64_t>(), hop.at("longest_gap_us").get<double>() * 1e-3,
                                 bits > 0 ? fmt::format("; to it in {} bits", bits) : "");
      }
    }
    for (const auto& s : n.at("serving")) {
      std::cout << fmt::format("  serves a joiner out of replica {} rank {}: {} sent, link {:.0f} MB/s",
                               s.at("replica").get<int>(), s.at("rank").get<int>(),
                               human_bytes(s.at("bytes").get<std::uint64_t>()),
                               s.at("link_bytes_per_second").get<double>() * 1e-6);
      if (s.at("coder_bytes_per_second").get<double>() > 0)
        std::cout << fmt::format(", zstd {} (to {:.2f} of the size at {:.0f} MB/s)",
                                 s.at("zstd").get<bool>() ? "on" : "off", s.at("coded_ratio").get<double>(),
                                 s.at("coder_bytes_per_second").get<double>() * 1e-6);
      std::cout << "\n";
    }
  }
}

// `corrupt`: it is no status of this version's.
Result<> print_table(const nlohmann::json& status, const std::string& address) {
  const auto other = [&](const std::string& why) {
    return fail(ErrorCode::corrupt, "what answers at {} is no Rejoin daemon of this version{}", address, why);
  };
  if (!status.is_object() ||
      !(status.contains("coordinator_role") || status.contains("relay_role") || status.contains("node_role")))
    return other("");
  try {
    print_roles(status);
  } catch (const nlohmann::json::exception& error) {
    return other(fmt::format(" ({})", error.what()));
  }
  return {};
}

}  // namespace

Result<int> show_status(const std::string& address, bool json) {
  auto status = fetch_status(address, json ? Texts::as_they_are : Texts::printable);
  if (!status) return tl::unexpected(status.error());
  if (json) std::cout << status->dump(2) << "\n";
  else if (auto printed = print_table(*status, address); !printed) return tl::unexpected(printed.error());
  return 0;
}

namespace {

struct Look {
  Result<nlohmann::json> status = nlohmann::json();
  TimePoint at{};
};
// Of all at the same time: those that do not answer would hold up the others.
Result<std::vector<Look>> look_at(const std::vector<std::string>& addresses) {
  constexpr std::size_t most_at_once = 64;
  std::vector<Look> looks(addresses.size());
  std::vector<std::thread> threads(std::min(addresses.size(), most_at_once));
  std::atomic<std::size_t> next = 0;
  std::optional<Error> lacking;
  for (auto& thread : threads) {
    const auto started = start_thread(thread, [&] {
      for (std::size_t i; (i = next++) < looks.size();) {
        auto status = fetch_status(addresses[i], Texts::printable);
        looks[i] = {.status = std::move(status), .at = SteadyClock().now()};
      }
    });
    if (started) continue;
    lacking = started.error();
    break;
  }
  for (auto& thread : threads)
    if (thread.joinable()) thread.join();
  if (lacking && next == 0) return tl::unexpected(*lacking);  // not even one
  return looks;
}

}  // namespace

Result<int> top(const std::vector<std::string>& addresses, std::chrono::milliseconds interval, std::uint64_t count) {
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  asio::io_context io;
  asio::steady_timer timer(io);
  std::map<std::string, std::pair<std::uint64_t, TimePoint>> committed_before;
  for (std::uint64_t round = 0; count == 0 || round < count; ++round) {
    if (round > 0) {
      timer.expires_after(interval);
      timer.wait();
    }
    const auto looks = look_at(addresses);
    if (!looks) return tl::unexpected(looks.error());
    if (terminal) std::cout << "\x1b[H\x1b[2J";
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      const auto& address = addresses[i];
      const auto& [status, now] = (*looks)[i];
      std::cout << "== " << address << "\n";
      if (!status) {
        std::cout << status.error().message << "\n";
        continue;
      }
      if (auto printed = print_table(*status, address); !printed) {
        std::cout << printed.error().message << "\n";
        continue;
      }
      if (!status->contains("coordinator_role")) continue;
      // Others that do not answer make a round longer than the interval.
      const auto committed = status->at("coordinator_role").at("committed").get<std::uint64_t>();
      if (auto before = committed_before.find(address); before != committed_before.end())
        std::cout << fmt::format("  {:.1f} steps a second\n",
                                 (static_cast<double>(committed) - static_cast<double>(before->second.first)) /
                                     seconds(now - before->second.second));
      committed_before[address] = {committed, now};
    }
    std::cout << std::flush;
  }
  return 0;
}

}  // namespace rejoin::daemon
