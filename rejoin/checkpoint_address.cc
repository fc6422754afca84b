#include "rejoin/checkpoint_address.h"

#include "base/fail.h"

namespace rejoin {

namespace {

constexpr std::string_view kScheme = "rejoin-checkpoint-1";

}  // namespace

std::string CheckpointAddress::text() const {
  return fmt::format("{} {:016x}{:016x} {} {}", kScheme, hello.secret[0], hello.secret[1], transport, address);
}

Result<CheckpointAddress> CheckpointAddress::parse(const std::string& text) {
  const auto words = split(text, ' ');
  if (words.size() < 4 || words[0] != kScheme || words[1].size() != 32 ||
      words[1].find_first_not_of("0123456789abcdef") != std::string::npos)
    return fail(ErrorCode::invalid_argument,
                "'{}' is no address of a checkpoint server: give what its address() has returned", text);
  CheckpointAddress parsed{.transport = words[2], .address = words[3]};
  for (std::size_t i = 4; i < words.size(); ++i) parsed.address += " " + words[i];
  for (std::size_t half = 0; half < 2; ++half)
    parsed.hello.secret[half] = std::stoull(words[1].substr(half * 16, 16), nullptr, 16);
  return parsed;
}

}  // namespace rejoin
