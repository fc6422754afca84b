#include "examples/demo_view.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/bytes.h"
#include "examples/demo_leads.h"

namespace rejoin::demo {

namespace {

std::string bar(double part, int width) {
  std::string text = "[";
  const int full = static_cast<int>(std::lround(part * width));
  for (int i = 0; i < width; ++i) text += i < full ? "█" : "·";
  return text + "]";
}

constexpr std::uint32_t kFew = 16;  // replicas, of each of which a line is shown

// "0,2-63": members in their order, where five or more follow one another as a range. One with a suffix stands
// alone.
std::string runs(const std::vector<std::string>& members) {
  std::string text;
  const auto number = [&](std::size_t i) {
    const bool bare = members[i].find_first_not_of("0123456789") == std::string::npos;
    return bare ? std::stol(members[i]) : -2 - static_cast<long>(2 * i);
  };
  for (std::size_t begin = 0, end = 0; begin < members.size(); begin = end) {
    for (end = begin + 1; end < members.size() && number(end) == number(end - 1) + 1;) ++end;
    if (end - begin < 5) end = begin + 1;
    text += (text.empty() ? "" : ",") + members[begin];
    if (end - begin >= 5) text += "-" + members[end - 1];
  }
  return text;
}

// Of a failure: what was done, and to which replica where it was to one.
std::string name_of(const nlohmann::json& failure) {
  const std::string kind = failure.at("kind");
  const bool of_all = kind.ends_with("_coordinator") || kind.ends_with("_all");
  return of_all ? kind : fmt::format("{} of replica {}", kind, failure.at("replica").get<int>());
}

// What became of a failure, as far as there was anything to measure: without survivors, say, there is no commit of
// theirs.
std::string line_of(const nlohmann::json& failure) {
  if (!failure.value("who", "").empty()) return cost_line(failure);
  std::string line = fmt::format("  {} at step {}: ", name_of(failure), failure.at("step").get<int>());
  if (const auto detected = failure.at("detected_ms").get<double>(); detected >= 0)
    line += fmt::format("seen after {:.1f} ms; ", detected);
  if (const auto resumed = failure.at("resumed_ms").get<double>(); resumed >= 0)
    line += fmt::format("the survivors' commit of that step {:.1f} ms later than their computing ({:.1f} ms in all); ",
                        resumed, failure.at("with_compute_ms").get<double>());
  return line + fmt::format("{} steps recomputed\n", failure.at("recomputed_steps").get<int>());
}

// Of each replica; or of many those that have the same in one line.
std::string digest_lines(const nlohmann::json& digests) {
  std::map<std::uint32_t, std::string> by_replica;
  for (const auto& [replica, its] : digests.items())
    for (const auto& digest : its)
      by_replica[static_cast<std::uint32_t>(std::stoul(replica))] += " " + digest.get<std::string>();
  std::string text;
  if (by_replica.size() <= kFew) {
    for (const auto& [replica, its] : by_replica) text += fmt::format("  replica {}: digests{}\n", replica, its);
    return text;
  }
  std::map<std::string, std::vector<std::string>> with;
  for (const auto& [replica, its] : by_replica) with[its].push_back(std::to_string(replica));
  for (const auto& [its, replicas] : with) text += fmt::format("  replicas {}: digests{}\n", runs(replicas), its);
  return text;
}

}  // namespace

LiveView::LiveView(const JobSettings& settings, bool quiet)
    : settings_(settings), quiet_(quiet), terminal_(::isatty(1) == 1) {}

void LiveView::draw(const Story& story) {
  if (quiet_) return;
  std::string roles;
  std::map<std::string, std::vector<std::string>> by_role;
  std::vector<std::string> lines;
  lines.push_back(fmt::format("step {:>5} of {}", story.committed(), settings_.steps));
  for (std::uint32_t r = 0; r < settings_.replicas; ++r) {
    auto found = story.replicas().find(r);
    const ReplicaState state = found == story.replicas().end() ? ReplicaState{} : found->second;
    std::string line = fmt::format("replica {}  {:<12} version {:>5}  loss {:<7}", r, state.role, state.version,
                                   state.loss > 0 ? fmt::format("{:.4f}", state.loss) : "-");
    if (state.role == "catching up") {
      std::uint64_t bytes = 0, total = 0, sources = 0;
      double rate = 0;
      for (const auto& [rank, catch_up] : state.catch_up) {
        bytes += catch_up.bytes;
        total += catch_up.total;
        rate += catch_up.rate;
        sources = std::max(sources, catch_up.sources);
      }
      line += total == 0 ? "  waiting for the first slices"
                         : fmt::format("  {} {} of {}, {:.0f} MB/s from {}",
                                       bar(static_cast<double>(bytes) / static_cast<double>(total), 16),
                                       human_bytes(bytes), human_bytes(total), rate * 1e-6, sources);
    }
    by_role[state.role].push_back(std::to_string(r));
    if (settings_.replicas <= kFew || state.role == "catching up") lines.push_back(line);
    roles += fmt::format(" {}={}", r, state.role);
  }
  if (settings_.replicas > kFew) {
    roles.clear();
    for (const auto& [role, replicas] : by_role) {
      roles += fmt::format(" {}={}", runs(replicas), role);
      lines.push_back(fmt::format("{:>4} {:<12} {}", replicas.size(), role, runs(replicas)));
    }
  }
  if (!terminal_) {
    if (std::exchange(last_roles_, roles) != roles) std::printf("step %5lu %s\n", story.committed(), roles.c_str());
    std::fflush(stdout);
    return;
  }
  if (lines_ > 0) std::printf("\x1b[%dA\x1b[J", lines_);
  for (const auto& line : lines) std::printf("\x1b[2K%s\n", line.c_str());
  lines_ = static_cast<int>(lines.size());
  std::fflush(stdout);
}

void LiveView::end() { std::fflush(stdout); }

std::string loss_curve(const Story& story, int width, int height) {
  const auto curve = story.losses();
  if (curve.size() < 2) return "";
  double low = curve[0].second, high = low;
  for (const auto& [step, loss] : curve) low = std::min(low, loss), high = std::max(high, loss);
  if (high - low < 1e-9) high = low + 1;
  const std::uint64_t last = curve.back().first;
  // Braille: two by four dots a character.
  std::vector<std::vector<unsigned>> cells(static_cast<std::size_t>(height),
                                           std::vector<unsigned>(static_cast<std::size_t>(width)));
  constexpr unsigned dot[4][2] = {{1, 8}, {2, 16}, {4, 32}, {64, 128}};
  for (int x = 0; x < 2 * width; ++x) {
    const auto from = last * static_cast<std::uint64_t>(x) / static_cast<std::uint64_t>(2 * width),
               to = last * static_cast<std::uint64_t>(x + 1) / static_cast<std::uint64_t>(2 * width);
    double sum = 0;
    int count = 0;
    for (const auto& [step, loss] : curve)
      if (step > from && step <= std::max(to, from + 1)) sum += loss, ++count;
    if (count == 0) continue;
    const int y =
        std::clamp(static_cast<int>((high - sum / count) / (high - low) * (4 * height - 1) + 0.5), 0, 4 * height - 1);
    cells[static_cast<std::size_t>(y / 4)][static_cast<std::size_t>(x / 2)] |= dot[y % 4][x % 2];
  }
  std::string text;
  for (int row = 0; row < height; ++row) {
    text += row == 0 ? fmt::format("{:7.3f} ┤", high) : row == height - 1 ? fmt::format("{:7.3f} ┤", low) : "        │";
    for (int x = 0; x < width; ++x) {
      const unsigned code = 0x2800 + cells[static_cast<std::size_t>(row)][static_cast<std::size_t>(x)];
      text += static_cast<char>(0xe0 | code >> 12);
      text += static_cast<char>(0x80 | (code >> 6 & 0x3f));
      text += static_cast<char>(0x80 | (code & 0x3f));
    }
    text += "\n";
  }
  std::string marks(static_cast<std::size_t>(width), ' ');
  const auto mark = [&](std::uint64_t step, char c) {
    marks[std::min<std::size_t>(marks.size() - 1, static_cast<std::size_t>(step) * marks.size() / last)] = c;
  };
  for (const auto& event : story.events())
    if (event.kind == "promoted") mark(event.number("step"), '^');
  for (const auto& deed : story.deeds()) mark(deed.step, 'x');
  return text + "        └" + std::string() +
         [&] {
           std::string line;
           for (int i = 0; i < width; ++i) line += "─";
           return line;
         }() +
         "\n         " + marks + "   x: failure  ^: contributes again\n";
}

std::string summary(const nlohmann::json& report) {
  std::string text = "\nWhat happened\n";
  for (const auto& event : report.at("events")) {
    const std::string kind = event.at("kind");
    std::string what;
    if (kind == "kill" || kind == "hang" || kind == "kill_source" || kind == "kill_joiner")
      what = fmt::format("{} replica {} rank {} in the middle of step {}", kind == "hang" ? "kill -STOP" : "kill -9",
                         event.at("replica").get<int>(), event.at("rank").get<int>(), event.at("step").get<int>());
    else if (kind == "kill_daemon")
      what = fmt::format("kill -9 the daemon of replica {}", event.at("replica").get<int>());
    else if (kind == "kill_coordinator") what = "kill -9 the coordinator";
    else if (kind == "pause_coordinator") what = "kill -STOP the coordinator, for a while";
    else if (kind == "kill_leader" || kind == "kill_etcd")
      what = fmt::format("kill -9 {}", event.at("who").get<std::string>());
    else if (kind == "pause_leader" || kind == "pause_etcd")
      what = fmt::format("kill -STOP {}, for a while", event.at("who").get<std::string>());
    else if (kind == "leader" || kind == "standby")
      what = fmt::format("{} {} in term {}", event.at("who").get<std::string>(), kind == "leader" ? "leads" : "follows",
                         event.at("term").get<int>());
    else if (kind == "pause_all") what = "kill -STOP all processes, for a while";
    else if (kind == "rank_down")
      what = fmt::format("daemon: replica {} rank {} is down: {}", event.at("replica").get<int>(),
                         event.at("rank").get<int>(), event.value("reason", ""));
    else if (kind == "epoch")
      what = fmt::format("epoch with replicas {} after step {} ({})", runs(split(event.value("members", ""), ',')),
                         event.at("step").get<int>() - 1, event.value("reason", ""));
    else if (kind == "catch_up_started")
      what = fmt::format("replica {} rank {} begins to catch up at step {}", event.at("replica").get<int>(),
                         event.at("rank").get<int>(), event.at("step").get<int>());
    else if (kind == "promoted")
      what = fmt::format("replica {} rank {} contributes from step {}", event.at("replica").get<int>(),
                         event.at("rank").get<int>(), event.at("step").get<int>());
    else if (kind == "daemon_lost" || kind == "daemon_back")
      what = fmt::format("replica {} rank {} {} its daemon", event.at("replica").get<int>(),
                         event.at("rank").get<int>(), kind == "daemon_lost" ? "lost" : "registered again with");
    else continue;
    text += fmt::format("{:>10.1f} ms  {}\n", event.at("t_ms").get<double>(), what);
  }
  text += "\nFailures\n";
  for (const auto& f : report.at("failures")) text += line_of(f);
  for (const auto& c : report.at("catch_ups"))
    text += fmt::format(
        "  replica {} rank {} caught up: {} from {} sources in {:.0f} ms ({:.0f} MB/s), from step {} to {}, {} slices "
        "fetched again\n",
        c.at("replica").get<int>(), c.at("rank").get<int>(), human_bytes(c.value("bytes", std::uint64_t{0})),
        c.value("sources", 0), c.value("seconds", 0.0) * 1e3,
        static_cast<double>(c.value("bytes", std::uint64_t{0})) / 1e6 / std::max(c.value("seconds", 0.0), 1e-6),
        c.at("started_step").get<int>(), c.at("promoted_step").get<int>(), c.value("refetched", 0));
  const auto& steps = report.at("step_ms");
  const double median = steps.at("median").get<double>(), during = steps.at("median_during_catch_up").get<double>();
  text += fmt::format("  a step: median {:.1f} ms, p99 {:.1f}, max {:.1f}", median, steps.at("p99").get<double>(),
                      steps.at("max").get<double>());
  if (median > 0 && during > 0)  // what a catch-up costs those who train on
    text += fmt::format("; median while a replica caught up {:.1f}, {:.2f} × the time", during, during / median);
  text += "\n";
  text += "\nProof\n";
  if (report.contains("digests")) text += digest_lines(report.at("digests"));
  for (const auto& replica : report.at("absent"))
    text += fmt::format("  replica {} was not back before the last step\n", replica.get<int>());
  text += fmt::format("  same bits on all replicas: {}\n", report.at("same_bits").get<bool>() ? "yes" : "NO");
  const auto& ledger = report.at("ledger");
  text += fmt::format("  ledger: {} samples, {} trained once, {} lost, {} repeated\n",
                      ledger.at("samples").get<std::uint64_t>(), ledger.at("once").get<std::uint64_t>(),
                      ledger.at("lost").get<std::uint64_t>(), ledger.at("repeated").get<std::uint64_t>());
  if (const auto lost = report.value("rolled_back_steps", std::uint64_t{0}); !report.contains("rolled_back_steps"))
    text += "  state survives: unknown, without the coordinator's log\n";
  else if (lost == 0) text += "  state survives: yes: no committed step was rolled back\n";
  else text += fmt::format("  state survives: no: {} steps were rolled back\n", lost);
  text += proof_lines(report);
  if (report.contains("loss")) {
    const auto& loss = report.at("loss");
    text += fmt::format("  loss: {:.4f} at first, {:.4f} at last", loss.at("first").get<double>(),
                        loss.at("last").get<double>());
    if (loss.contains("last_without_failure"))
      text += fmt::format("; {:.4f} in the same run without a failure", loss.at("last_without_failure").get<double>());
    text += "\n";
  }
  return text;
}

}  // namespace rejoin::demo
