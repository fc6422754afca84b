#include "rejoin/position.h"

#include "base/bytes.h"
#include "base/digest.h"
#include "base/fail.h"
#include "base/number.h"
#include "membership/ledger.h"

namespace rejoin {

namespace {

constexpr std::string_view kKind = "rejoin-position", kVersion = "1";

std::uint64_t checksum(std::string_view text) { return digest(as_bytes(text)); }

// Takes what stands before the separator, or all that is left.
std::string_view take(std::string_view& text, char separator) {
  const auto end = std::min(text.find(separator), text.size());
  const auto field = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return field;
}

std::optional<std::uint64_t> number(std::string_view text, int base = 10) {
  std::uint64_t value = 0;
  return parse_number(text, value, base) ? std::optional(value) : std::nullopt;
}

// "0-100,116-200": [begin, end)
std::optional<std::vector<SampleRange>> ranges(std::string_view text) {
  std::vector<SampleRange> all;
  while (!text.empty()) {
    auto range = take(text, ',');
    const auto begin = number(take(range, '-')), end = number(range);
    const bool follows = all.empty() || (begin && *begin > all.back().end);
    if (!begin || !end || *begin >= *end || *end > membership::kMostSamples || !follows) return std::nullopt;
    all.push_back({*begin, *end});
  }
  return all;
}

}  // namespace

std::string Position::text() const {
  std::string samples;
  for (const auto& range : trained_)
    samples += fmt::format("{}{}-{}", samples.empty() ? "" : ",", range.begin, range.end);
  const std::string content = fmt::format("{} {} step={} trained={} digest={}", kKind, kVersion, step_, samples,
                                          digest_ ? fmt::format("{:016x}", *digest_) : "");
  return fmt::format("{} checksum={:016x}", content, checksum(content));
}

Result<Position> Position::from_text(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  const auto damaged = [&] {
    return fail(ErrorCode::corrupt,
                "'{}' is not a whole Rejoin position: it was cut off, changed, or is something else. Take another "
                "checkpoint",
                text.substr(0, 200));
  };
  std::string_view rest = text;
  if (take(rest, ' ') != kKind) return damaged();
  if (const auto version = take(rest, ' '); version != kVersion)
    return fail(ErrorCode::mismatch, "the position is of format '{}', and this library reads {}: use the later library",
                version, kVersion);
  const auto field = [&](std::string_view name) -> std::optional<std::string_view> {
    auto value = take(rest, ' ');
    return take(value, '=') == name ? std::optional(value) : std::nullopt;
  };
  const auto step = field("step"), trained = field("trained"), digest = field("digest"), sum = field("checksum");
  if (!step || !trained || !digest || !sum || !rest.empty()) return damaged();
  const auto content = text.substr(0, text.rfind(' '));
  if (number(*sum, 16) != checksum(content)) return damaged();
  const auto at = number(*step), of_state = number(*digest, 16);
  auto samples = ranges(*trained);
  if (!at || !samples || (!digest->empty() && !of_state)) return damaged();
  return Position(*at, std::move(*samples), of_state);
}

}  // namespace rejoin
