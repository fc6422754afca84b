// A UCX worker's address as text: "ucx:HEX.CHECKSUM". The checksum keeps a mistyped one out of UCX, which does not
// check.
#pragma once

#include "base/bytes.h"
#include "base/result.h"

namespace rejoin::transport::ucx {

std::string format_address(BytesView address);
Result<Bytes> parse_address(const std::string& text);

}  // namespace rejoin::transport::ucx
