#include "daemon/incident_words.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <ctime>

#include "base/bytes.h"

namespace rejoin::daemon {

std::string time_of_day(std::int64_t wall) {
  return fmt::format("{:%H:%M:%S}.{:03d}", fmt::gmtime(static_cast<std::time_t>(wall / kSecond)),
                     wall % kSecond / 1'000'000);
}

std::string lasting(std::int64_t ns) {
  const auto count = static_cast<double>(std::max<std::int64_t>(ns, 0));
  if (ns < kSecond) return fmt::format("{:.1f} ms", count * 1e-6);
  return ns < 120 * kSecond ? fmt::format("{:.2f} s", count * 1e-9) : fmt::format("{:.1f} min", count / 60e9);
}

std::string role_of(const Recording& one) {
  if (place_of(one)) return "trainer " + one.who;
  if (one.who.starts_with("relay")) return one.who;
  return decides(one) ? (one.who.starts_with("coordinator") ? one.who : "coordinator and daemon " + one.who)
                      : "daemon " + one.who;
}

std::string process_of(const Recording& one) {
  return fmt::format("{} (process {} on {})", role_of(one), one.pid, one.host);
}

std::string capital(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

std::string short_text(const std::string& text) { return printable(text, 120); }

const RecordedEvent* last_before(const Recording& one, std::int64_t at) {
  const RecordedEvent* last = nullptr;
  for (const auto& event : one.events)
    if (event.at <= at) last = &event;
  return last;
}

const RecordedEvent* find_event(const Recording& one, events::Kind kind, std::int64_t from, std::int64_t to) {
  for (const auto& event : one.events)
    if (event.kind == kind && event.at >= from && event.at <= to) return &event;
  return nullptr;
}

}  // namespace rejoin::daemon
