#include "rejoin/checkpoint_address.h"

#include <algorithm>

#include "base/fail.h"
#include "transport/factory.h"

namespace rejoin {

namespace {

constexpr std::string_view kScheme = "rejoin-checkpoint-1";

}  // namespace

std::string CheckpointAddress::text() const {
  return fmt::format("{} {:016x}{:016x} {} {}", kScheme, hello.secret[0], hello.secret[1], family, address);
}

std::string CheckpointAddress::family_of(const std::string& transport) {
  std::string family = transport::family_of(transport);
  std::replace(family.begin(), family.end(), ' ', '-');
  return family;
}

Result<CheckpointAddress> CheckpointAddress::parse(const std::string& text) {
  const auto words = split(text, ' ');
  if (words.size() < 4 || words[0] != kScheme || words[1].size() != 32 ||
      words[1].find_first_not_of("0123456789abcdef") != std::string::npos)
    return fail(ErrorCode::invalid_argument,
                "'{}' is no address of a checkpoint server: give what its address() has returned", text);
  CheckpointAddress parsed{.family = words[2], .address = words[3]};
  for (std::size_t i = 4; i < words.size(); ++i) parsed.address += " " + words[i];
  for (std::size_t half = 0; half < 2; ++half)
    parsed.hello.secret[half] = std::stoull(words[1].substr(half * 16, 16), nullptr, 16);
  return parsed;
}

}  // namespace rejoin
