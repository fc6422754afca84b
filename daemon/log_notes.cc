#include "daemon/log_notes.h"

#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/events.h"
#include "base/log.h"

namespace rejoin::daemon {

namespace {

// A trainer that is refused and started again is refused in the same words many times a second. Returns how often it
// was since they were logged; nothing where that was within the last minute.
std::optional<std::uint64_t> may_say(const std::string& text, TimePoint now) {
  constexpr std::size_t most = 256;
  struct Said {
    TimePoint at;
    std::uint64_t left_out = 0;
  };
  static thread_local std::map<std::string, Said> said;
  const auto lately = [now](const Said& one) { return now - one.at < std::chrono::minutes(1); };
  if (text.find(" was refused: ") == std::string::npos && text.find(": it has left: ") == std::string::npos) return 0;
  const auto known = said.find(text);
  if (known != said.end() && lately(known->second)) return ++known->second.left_out, std::nullopt;
  const std::uint64_t left_out = known == said.end() ? 0 : known->second.left_out;
  if (said.size() >= most) std::erase_if(said, [&](const auto& one) { return !lately(one.second); });
  if (said.size() < most) said[text] = {now};
  return left_out;
}

}  // namespace

void log_notes(const std::vector<membership::Note>& notes, std::string_view of) {
  for (const auto& note : notes) {
    const auto left_out = note.warning ? may_say(note.text, SteadyClock().now()) : 0;
    if (!left_out) continue;
    const std::string more = *left_out > 0 ? fmt::format(" (and {} times more since that was logged)", *left_out) : "";
    spdlog::log(note.warning ? spdlog::level::warn : spdlog::level::info, "{}{}{}", of, note.text, more);
    events::record(note.warning ? events::Kind::warning : events::Kind::note, {}, note.text);
  }
}

}  // namespace rejoin::daemon
