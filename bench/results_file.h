// Results of a bench as a file.
#pragma once

#include <fstream>
#include <string>

#include "base/fail.h"

namespace rejoin::bench {

// One line end is put behind the text. Does nothing without a path. Errors: `io`.
inline Result<> write_results(const std::string& path, const std::string& text) {
  if (path.empty()) return {};
  std::ofstream out(path);
  out << text << "\n";
  if (!out.flush()) return fail_errno("can't write " + path);
  return {};
}

}  // namespace rejoin::bench
