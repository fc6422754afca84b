// Reads the text of a settings file: one 'name = value' a line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rejoin {

struct Setting {
  std::string name, value;  // a name that stands alone has the value "true"
  std::size_t line = 0;     // from 1
};

// A value is one word, or stands in quotes, "…" or '…', and is then what is between them, whatever that is. A comment
// begins with '#', at the beginning of a line (there also with ';') or behind a blank. Errors: `invalid_argument`,
// which begins with "line N: ", for a line that is nothing of that, and for a name that stands a second time.
Result<std::vector<Setting>> parse_settings(std::string_view text);

}  // namespace rejoin
