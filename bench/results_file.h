// Results of a bench as a file.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/fail.h"

namespace rejoin::bench {

// Whether results can be written there, as far as that shows before: asked before a bench runs, for hours perhaps.
// Leaves everything as it is. Errors: `io`.
inline Result<> check_results(const std::string& path) {
  if (path.empty()) return {};
  std::error_code ignored;
  const std::filesystem::path file(path);
  const auto directory = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  if (std::filesystem::is_directory(file, ignored))
    return fail(ErrorCode::io, "can't write {}: it is a directory", path);
  const bool there = std::filesystem::exists(file, ignored);
  if (::access(there ? path.c_str() : directory.c_str(), there ? W_OK : W_OK | X_OK) != 0)
    return fail_errno("can't write " + path);
  return {};
}

// One line end is put behind the text. Does nothing without a path. Errors: `io`.
inline Result<> write_results(const std::string& path, const std::string& text) {
  if (path.empty()) return {};
  std::ofstream out(path);
  out << text << "\n";
  if (!out.flush()) return fail_errno("can't write " + path);
  return {};
}

}  // namespace rejoin::bench
