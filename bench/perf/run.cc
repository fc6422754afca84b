// rejoin_write_bw, rejoin_read_bw, rejoin_write_lat, rejoin_send_lat: the transport point to point, in the manner of
// perftest: one process is started without a host, the other with the first one's.
#include "bench/perf/run.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/fail.h"
#include "base/log.h"
#include "bench/perf/link.h"
#include "bench/results_file.h"
#include "bench/usage.h"

namespace rejoin::bench::perf {
namespace {

using transport::Event;
using transport::EventKind;

constexpr const char* kLine =
    "---------------------------------------------------------------------------------------\n";

std::byte pattern(std::uint64_t i, std::uint64_t size) { return static_cast<std::byte>((i * 131 + size) >> 3); }

class Run {
 public:
  Run(const Options& options, Link& link) : o_(options), link_(link) {}

  Result<> bandwidth(std::uint64_t size) {
    const bool active = !o_.server() || o_.bidirectional;
    Bytes expected(size);
    for (std::uint64_t i = 0; i < size; ++i) expected[i] = pattern(i, size);
    if (auto put = link_.put(link_.outbox(), expected); !put) return put;
    if (auto put = link_.put(link_.inbox(), Bytes(link_.inbox().size())); !put) return put;
    if (auto met = link_.meet(); !met) return met;
    std::uint64_t posted = 0, done = 0;
    std::vector<TimePoint> posts, ends;
    const Usage usage;
    const TimePoint start = link_.now(), deadline = start + std::chrono::seconds(o_.duration_s);
    const auto more = [&] { return o_.duration_s > 0 ? link_.now() < deadline : posted < o_.iterations; };
    std::vector<transport::Write> writes;
    std::vector<transport::Read> reads;
    bool going = active;
    while (active && (going || done < posted)) {
      writes.clear(), reads.clear();
      while (going && posted - done < o_.depth) {
        if (!(going = more())) break;
        const std::uint64_t half = link_.memory().size() / 2;
        if (o_.test == Test::write_bw)
          writes.push_back({.context = posted,
                            .local = {link_.region(), 0},
                            .remote = {link_.remote(), half},
                            .length = size,
                            .notify = std::nullopt});
        else
          reads.push_back(
              {.context = posted, .local = {link_.region(), half}, .remote = {link_.remote(), 0}, .length = size});
        posts.push_back(link_.now());
        ++posted;
      }
      Result<> result;
      if (!writes.empty()) result = link_.engine().write(link_.endpoint(), writes);
      if (result && !reads.empty()) result = link_.engine().read(link_.endpoint(), reads);
      if (!result) return result;
      link_.wait_for_event();
      result = link_.poll([&](const Event& event) {
        if (event.kind != EventKind::completed) return;
        ++done;
        ends.push_back(link_.now());
      });
      if (!result) return result;
    }
    const double took = seconds(link_.now() - start);
    const Used used = usage.now();
    if (auto met = link_.meet(); !met) return met;
    const bool receives = o_.test == Test::write_bw ? o_.server() || o_.bidirectional : active;
    if (o_.verify && receives) {
      const auto arrived = link_.get(link_.inbox().first(size));
      if (!arrived) return tl::unexpected(arrived.error());
      const auto wrong = std::mismatch(expected.begin(), expected.end(), arrived->begin()).first;
      if (wrong != expected.end())
        return fail(ErrorCode::corrupt, "--verify: byte {} of {} did not arrive", wrong - expected.begin(), size);
    }
    if (!active) return {};
    // As perftest: the best over any stretch from one post to a later completion, with some hundred in between.
    double peak = 0;
    const std::uint64_t stretch = std::min<std::uint64_t>(done, std::max<std::uint64_t>(o_.depth, 100));
    for (std::uint64_t i = 0; i + stretch <= done; ++i)
      peak = std::max(peak,
                      static_cast<double>(stretch * size) / std::max(1e-9, seconds(ends[i + stretch - 1] - posts[i])));
    const double average = static_cast<double>(done * size) / took * (o_.bidirectional ? 2 : 1);
    const double unit = o_.gbits ? 1e9 / 8 : 1024.0 * 1024.0;
    const double rate = static_cast<double>(done) / took * 1e-6 * (o_.bidirectional ? 2 : 1);
    peak = std::max(peak * (o_.bidirectional ? 2 : 1), average);
    std::printf(" %-10lu %-15lu %-18.2f %-18.2f %-.6f\n", static_cast<unsigned long>(size),
                static_cast<unsigned long>(done), peak / unit, average / unit, rate);
    results_.push_back({{"MsgSize", size},
                        {"n_iterations", done},
                        {"BW_peak", peak / unit},
                        {"BW_average", average / unit},
                        {"MsgRate", rate}});
    note(usage, used, size, static_cast<double>(done));
    return {};
  }

  Result<> latency(std::uint64_t size) {
    std::vector<double> times;
    auto inbox = link_.inbox();
    std::fill(inbox.begin(), inbox.end(), std::byte{0});
    const std::uint64_t before = link_.messages();
    if (auto met = link_.meet(); !met) return met;
    // A write is seen by its last byte, which counts; nothing tells of it.
    const auto* last = reinterpret_cast<const volatile unsigned char*>(inbox.data() + size - 1);
    const auto post = [&](std::uint64_t turn) -> Result<> {
      if (o_.test == Test::send_lat) return link_.engine().send(link_.endpoint(), link_.outbox().first(size));
      link_.outbox()[size - 1] = static_cast<std::byte>(turn % 251 + 1);
      const transport::Write write{.context = turn,
                                   .local = {link_.region(), 0},
                                   .remote = {link_.remote(), link_.memory().size() / 2},
                                   .length = size,
                                   .notify = std::nullopt};
      if (auto written = link_.engine().write(link_.endpoint(), {&write, 1}); !written) return written;
      // As perftest: its own completion first, and then what the other side answers.
      bool completed = false;
      return link_.until([&] { return completed; },
                         [&](const Event& event) { completed |= event.kind == EventKind::completed; });
    };
    // Looks at the memory for each poll(): where the device lands the bytes itself, they are there without one.
    const int looks = o_.transport == "ibverbs" ? 4096 : 16;
    const auto wait = [&](std::uint64_t turn) {
      const auto expected = static_cast<unsigned char>(turn % 251 + 1);
      return link_.until([&] {
        if (o_.test == Test::send_lat) return link_.messages() > before + turn;
        for (int i = 0; i < looks; ++i)
          if (*last == expected) return true;
        return false;
      });
    };
    const TimePoint deadline = link_.now() + std::chrono::seconds(o_.duration_s);
    constexpr std::uint64_t warm_ups = 50;
    const Usage usage;
    TimePoint start = link_.now();  // of this turn
    for (std::uint64_t turn = 0;
         o_.duration_s > 0 ? o_.server() || link_.now() < deadline : turn < o_.iterations + warm_ups; ++turn) {
      if (o_.server()) {
        if (auto came = wait(turn); !came) return o_.duration_s > 0 ? Result<>{} : came;
        if (auto posted = post(turn); !posted) return posted;
        continue;
      }
      if (auto posted = post(turn); !posted) return posted;
      if (auto came = wait(turn); !came) return came;
      const TimePoint end = link_.now();
      if (turn >= warm_ups) times.push_back(seconds(end - start) * 1e6 / 2);
      start = end;
    }
    const Used used = usage.now();
    if (o_.duration_s == 0)
      if (auto met = link_.meet(); !met) return met;
    if (o_.server() || times.empty()) return {};
    std::sort(times.begin(), times.end());
    const auto n = static_cast<double>(times.size());
    const double average = std::accumulate(times.begin(), times.end(), 0.0) / n;
    double variance = 0;
    for (double t : times) variance += (t - average) * (t - average) / n;
    const auto at = [&](double share) {
      return times[std::min(times.size() - 1, static_cast<std::size_t>(share * n))];
    };
    if (o_.histogram)
      for (std::size_t i = 0; i < times.size(); ++i) std::printf("%zu, %.2f\n", i + 1, times[i]);
    std::printf(" %-7lu %-14zu %-13.2f  %-11.2f  %-15.2f  %-13.2f  %-14.2f  %-22.2f  %-.2f\n",
                static_cast<unsigned long>(size), times.size(), times.front(), times.back(), at(0.5), average,
                std::sqrt(variance), at(0.99), at(0.999));
    results_.push_back({{"MsgSize", size},
                        {"n_iterations", times.size()},
                        {"t_min", times.front()},
                        {"t_max", times.back()},
                        {"t_typical", at(0.5)},
                        {"t_avg", average},
                        {"t_stdev", std::sqrt(variance)},
                        {"t_99", at(0.99)},
                        {"t_99.9", at(0.999)}});
    note(usage, used, size, n + warm_ups);
    return {};
  }

  Result<> all() {
    std::printf("%s                    %s\n Transport       : %s\n Memory          : %s\n TX depth        : %u\n%s",
                kLine, o_.title().c_str(), o_.engine().c_str(), link_.memory_name().c_str(),
                o_.latency() ? 1 : o_.depth, kLine);
    if (o_.latency())
      std::printf(
          " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   "
          "99%% percentile[usec]   99.9%% percentile[usec]\n");
    else
      std::printf(" #bytes     #iterations    BW peak[%s]    BW average[%s]   MsgRate[Mpps]\n",
                  o_.gbits ? "Gb/sec" : "MB/sec", o_.gbits ? "Gb/sec" : "MB/sec");
    for (auto size : o_.sizes()) {
      if (auto done = o_.latency() ? latency(size) : bandwidth(size); !done) return done;
      std::fflush(stdout);
    }
    std::printf("%s%s", costs_.empty() ? "" : kLine, costs_.c_str());
    if (!why_not_.empty()) std::printf("# system calls: not countable here: %s\n", why_not_.c_str());
    std::printf("%s", kLine);
    if (results_.empty()) return {};
    const nlohmann::json json{{"test", o_.title()}, {"transport", o_.engine()}, {"results", results_}};
    return write_results(o_.json_file, json.dump(2));
  }

 private:
  // What so many operations have cost this side.
  void note(const Usage& usage, const Used& used, std::uint64_t size, double operations) {
    const double cpu = used.cpu_seconds / operations;
    const double per_gib = cpu / static_cast<double>(size) * 1024 * 1024 * 1024;
    results_.back().update({{"cpu_seconds_per_gib", per_gib}, {"cpu_usec_per_operation", cpu * 1e6}});
    std::string calls = "n/a";
    if (used.counted) {
      const double each = static_cast<double>(used.system_calls) / operations;
      results_.back()["system_calls_per_operation"] = each;
      calls = fmt::format("{:.2f}", each);
    }
    costs_ += fmt::format("# {} bytes, this side: CPU {:.3f} s/GiB, {:.2f} us/operation; system calls {}/operation\n",
                          size, per_gib, cpu * 1e6, calls);
    why_not_ = usage.why_not();
  }

  const Options& o_;
  Link& link_;
  std::string costs_, why_not_;
  nlohmann::json results_ = nlohmann::json::array();
};

}  // namespace

int run(Test test, int argc, char** argv) {
  init_logging("perf", "warn");
  auto options = parse(test, argc, argv);
  const auto complain = [&](const Error& error) {
    std::cerr << std::string(argv[0]).substr(std::string(argv[0]).rfind('/') + 1) << ": " << error.message << "\n";
    return 1;
  };
  if (!options) return complain(options.error());
  if (auto writable = check_results(options->json_file); !writable) return complain(writable.error());
  auto link = Link::open(*options);
  if (!link) return complain(link.error());
  if (auto done = Run(*options, **link).all(); !done) return complain(done.error());
  return 0;
}

}  // namespace rejoin::bench::perf
