#include "examples/text.h"

#include <fstream>
#include <iterator>

#include "base/fail.h"

namespace rejoin::demo {

Result<std::string> read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (text.size() < 1000) return fail(ErrorCode::not_found, "{} can't be read or has under 1000 bytes", path);
  return text;
}

}  // namespace rejoin::demo
