// The blocks of a file in PEM form. OpenSSL takes what it can't read for the end of a file, and so a part of one that
// is damaged, or not written in full yet, for the whole.
#pragma once

#include <string_view>
#include <vector>

#include "base/result.h"

namespace rejoin::daemon {

struct PemBlock {
  std::string_view kind;  // as "CERTIFICATE"
  std::string_view text;  // with its first and last line
  std::size_t line = 0;   // that it begins in, from 1 on
};

// What is between blocks is for people. An error says where a beginning or an end is missing; what is in a block is not
// looked at. A file that is cut off between two blocks can't be told from a whole one.
Result<std::vector<PemBlock>> pem_blocks(std::string_view text);

}  // namespace rejoin::daemon
