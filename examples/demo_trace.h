// A run's events as a Chrome/Perfetto trace.
#pragma once

#include "examples/demo_story.h"

namespace rejoin::demo {

Result<> write_trace(const std::string& path, const std::vector<Event>& events, const std::vector<Deed>& deeds);

}  // namespace rejoin::demo
