// What a machine notes of what it has decided or seen, as lines of this process's log.
#pragma once

#include <string_view>
#include <vector>

#include "membership/note.h"

namespace rejoin::daemon {

// `of`: what each line begins with. Why a replica was refused is said once a minute, however often it comes again.
void log_notes(const std::vector<membership::Note>& notes, std::string_view of = "");

}  // namespace rejoin::daemon
