// The form of the setting --flight-dir; flight.h says what it means.
#pragma once

#include <strings.h>

#include <string>

#include "base/fail.h"

namespace rejoin::flight {

inline Result<> check_setting(const std::string& directory) {
  if (directory == "off" || ::strcasecmp(directory.c_str(), "off") != 0) return {};
  return fail(ErrorCode::invalid_argument, "'{}': for no recording it is 'off'; for a directory of this name './{}'",
              directory, directory);
}

}  // namespace rejoin::flight
