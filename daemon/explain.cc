#include "daemon/explain.h"

#include <fmt/chrono.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "base/fail.h"
#include "base/flight.h"
#include "base/number.h"
#include "daemon/incident_story.h"
#include "daemon/incident_words.h"

namespace rejoin::daemon {

namespace {

constexpr std::int64_t kDay = 86400 * kSecond;

std::string date_of(std::int64_t wall) {
  return fmt::format("{:%Y-%m-%d}", fmt::gmtime(static_cast<std::time_t>(wall / kSecond)));
}

std::string recordings_counted(std::size_t count) {
  return fmt::format("{} recording{}", count, count == 1 ? "" : "s");
}

std::string unknown_ends(const Incidents& incidents) {
  return fmt::format(
      "of {} process{} it is unknown whether they lived when their recordings were copied, or all of a machine ended "
      "together",
      incidents.unknown, incidents.unknown == 1 ? "" : "es");
}

}  // namespace

Result<std::int64_t> parse_time(const std::string& text, std::int64_t near) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, used = 0;
  double second = 0;
  const auto rest = [&] { return std::string_view(text).substr(static_cast<std::size_t>(used)); };
  const auto in_day = [&] {
    return (hour * 3600 + minute * 60) * kSecond + static_cast<std::int64_t>(std::llround(second * 1e9));
  };
  const auto sound = [&] {
    return hour >= 0 && hour < 24 && minute >= 0 && minute < 60 && second >= 0 && second < 61 &&
           (rest().empty() || rest() == "Z");
  };
  if (std::sscanf(text.c_str(), "%4d-%2d-%2d%*1[T ]%2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second,
                  &used) == 6 &&
      sound() && year >= 1970 && month >= 1 && month <= 12 && day >= 1 && day <= 31) {
    std::tm date{};
    date.tm_year = year - 1900, date.tm_mon = month - 1, date.tm_mday = day;
    return static_cast<std::int64_t>(::timegm(&date)) * kSecond + in_day();
  }
  if (std::sscanf(text.c_str(), "%2d:%2d:%lf%n", &hour, &minute, &second, &used) == 3 && sound()) {
    const std::int64_t today = near / kDay * kDay + in_day();
    const auto distance = [&](std::int64_t time) { return std::abs(time - near); };
    return std::ranges::min(std::vector{today - kDay, today, today + kDay}, {}, distance);
  }
  if (double seconds = 0; std::sscanf(text.c_str(), "%lf%n", &seconds, &used) == 1 && rest().empty() && seconds >= 0 &&
                          seconds < 9e9 && text.find(':') == std::string::npos)
    return static_cast<std::int64_t>(seconds * 1e9);
  return fail(ErrorCode::invalid_argument,
              "--at {}: give a time in UTC as 14:01:22.125 or 2026-11-26T14:01:22.125Z, or seconds since 1970", text);
}

std::vector<std::string> list(const Recordings& recordings, const Incidents& incidents) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < incidents.all.size(); ++i) {
    const auto& one = incidents.all[i];
    const std::int64_t wall = recordings.wall(one.at);
    std::string line = fmt::format("{:>3}  {} {} UTC  {}", i + 1, date_of(wall), time_of_day(wall), one.title());
    if (one.decision && !incidents.decisions[*one.decision].reason.empty())
      line += fmt::format(" ({})", incidents.decisions[*one.decision].reason);
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<std::string> explain(const Recordings& recordings, const Incidents& incidents, const Incident& incident) {
  const auto number = &incident - incidents.all.data() + 1;
  const std::int64_t wall = recordings.wall(incident.at);
  std::vector<std::string> lines{fmt::format("Incident {} of {}: {}; {} {} UTC", number, incidents.all.size(),
                                             incident.title(), date_of(wall), time_of_day(wall))};
  const IncidentStory story(recordings, incidents, incident);
  story.tell(lines);
  std::string basis =
      fmt::format("Known from: {} of job {:016x}", recordings_counted(recordings.all.size()), recordings.job);
  if (recordings.clocks <= 1) basis += "; one machine's clock, so all times fit each other.";
  else
    basis += fmt::format("; the clocks of {} machines are compared by their heartbeats, to within {:.2f} ms.",
                         recordings.clocks, static_cast<double>(recordings.clock_error) * 1e-6);
  lines.push_back(std::move(basis));
  for (const auto& note : recordings.notes) lines.push_back("Note: " + note);
  if (incidents.unknown > 0) lines.push_back(fmt::format("Note: {}.", unknown_ends(incidents)));
  return lines;
}

namespace {

Result<const Incident*> chosen(const Recordings& recordings, const Incidents& incidents,
                               const ExplainOptions& options) {
  if (options.epoch) {
    for (const auto& one : incidents.all)
      if (one.decision && one.epoch == *options.epoch) return &one;
    std::string known;
    for (const auto& one : incidents.all)
      if (one.decision) known += fmt::format("{}{}", known.empty() ? "" : ", ", one.epoch);
    return fail(ErrorCode::not_found, "epoch {} took nobody out, as far as the recordings go; those that did: {}",
                *options.epoch, known.empty() ? "none" : known);
  }
  if (options.at.empty()) return &incidents.all.back();
  const auto at = parse_time(options.at, recordings.wall(incidents.all.back().at));
  if (!at) return tl::unexpected(at.error());
  const auto distance = [&](const Incident& one) {
    return std::abs(static_cast<double>(recordings.wall(one.at)) - static_cast<double>(*at));
  };
  return &*std::ranges::min_element(incidents.all, {}, distance);
}

}  // namespace

Result<std::string> explain(const ExplainOptions& options) {
  const auto recordings = read_recordings(options.paths, options.job);
  if (!recordings) return tl::unexpected(recordings.error());
  const std::string where =
      options.paths.empty() ? flight::default_directory() : fmt::format("{}", fmt::join(options.paths, ", "));
  if (recordings->all.empty())
    return fail(ErrorCode::not_found,
                "no flight recordings in {}{}; give the --flight-dir of the job's daemons and trainers, and what was "
                "copied from other nodes",
                where, recordings->notes.empty() ? "" : fmt::format(": {}", fmt::join(recordings->notes, " ")));
  const Incidents incidents = find_incidents(*recordings);
  if (incidents.all.empty())
    return fail(ErrorCode::not_found,
                "nobody was taken out and no process ended without a word, as far as the {} in {} go{}",
                recordings_counted(recordings->all.size()), where,
                incidents.unknown == 0 ? "" : "; " + unknown_ends(incidents));
  if (options.list) return fmt::format("{}\n", fmt::join(list(*recordings, incidents), "\n"));
  const auto incident = chosen(*recordings, incidents, options);
  if (!incident) return tl::unexpected(incident.error());
  return fmt::format("{}\n", fmt::join(explain(*recordings, incidents, **incident), "\n"));
}

}  // namespace rejoin::daemon
