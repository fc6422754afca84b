#include "daemon/log_notes.h"

#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/events.h"
#include "base/log.h"
#include "base/seldom.h"

namespace rejoin::daemon {

namespace {

// A trainer that is refused and started again is refused for the same reason many times a second. Returns how often it
// was since they were logged; nothing where that was within the last minute.
std::optional<std::uint64_t> may_say(const membership::Note& note, TimePoint now) {
  constexpr std::size_t most = 256;
  static thread_local std::map<std::string, Seldom> said;
  const std::string& text = note.like.empty() ? note.text : note.like;
  if (note.like.empty() && text.find(" was refused: ") == text.npos && text.find(": it has left: ") == text.npos)
    return 0;
  const bool full = said.size() >= most && !said.contains(text);
  if (full) std::erase_if(said, [&](const auto& one) { return one.second.is_over(now); });
  if (full && said.size() >= most) return 0;
  return said.try_emplace(text, std::chrono::minutes(1)).first->second.may_say(now);
}

}  // namespace

void log_notes(const std::vector<membership::Note>& notes, std::string_view of) {
  for (const auto& note : notes) {
    const auto left_out = note.warning ? may_say(note, SteadyClock().now()) : 0;
    if (!left_out) continue;
    const std::string more = *left_out > 0 ? fmt::format(" (and {} times more since that was logged)", *left_out) : "";
    spdlog::log(note.warning ? spdlog::level::warn : spdlog::level::info, "{}{}{}", of, note.text, more);
    events::record(note.warning ? events::Kind::warning : events::Kind::note, {}, note.text);
  }
}

}  // namespace rejoin::daemon
