#include "transport/ucx/address.h"

#include <xxhash.h>

#include <charconv>

#include "base/fail.h"

namespace rejoin::transport::ucx {

std::string format_address(BytesView address) {
  std::string text = "ucx:";
  for (auto byte : address) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text + fmt::format(".{:016x}", XXH3_64bits(address.data(), address.size()));
}

Result<Bytes> parse_address(const std::string& text) {
  const auto bad = [&] {
    return fail(ErrorCode::invalid_argument, "'{}' is not the address of a UCX engine (ucx:HEX.CHECKSUM)",
                text.substr(0, 40));
  };
  const auto dot = text.rfind('.');
  if (!text.starts_with("ucx:") || dot == std::string::npos || (dot - 4) % 2 != 0 || dot - 4 > 16 * KiB) return bad();
  Bytes address;
  for (std::size_t i = 4; i < dot; i += 2) {
    unsigned value = 0;
    const auto parsed = std::from_chars(text.data() + i, text.data() + i + 2, value, 16);
    if (parsed.ptr != text.data() + i + 2) return bad();
    address.push_back(static_cast<std::byte>(value));
  }
  if (format_address(address) != text) return bad();
  return address;
}

}  // namespace rejoin::transport::ucx
