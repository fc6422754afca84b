#include "daemon/log_notes.h"

#include "base/events.h"
#include "base/log.h"

namespace rejoin::daemon {

void log_notes(const std::vector<membership::Note>& notes, std::string_view of) {
  for (const auto& note : notes) {
    spdlog::log(note.warning ? spdlog::level::warn : spdlog::level::info, "{}{}", of, note.text);
    events::record(note.warning ? events::Kind::warning : events::Kind::note, {}, note.text);
  }
}

}  // namespace rejoin::daemon
