#include "daemon/clock_stamp.h"

#include <bit>
#include <cstring>

#include "base/clock.h"
#include "base/events.h"
#include "base/flight.h"

namespace rejoin::daemon {

namespace {

// The keys of fields 1000 and 1001, both of 64 bits.
constexpr char kKeys[2][2] = {{'\xc1', '\x3e'}, {'\xc9', '\x3e'}};
constexpr std::size_t kFieldBytes = 2 + 8;
static_assert(std::endian::native == std::endian::little, "as protobuf has them");

}  // namespace

void append(std::string& message, const ClockStamp& stamp) {
  const std::uint64_t fields[2] = {stamp.clock, static_cast<std::uint64_t>(stamp.sent_ns)};
  for (int i = 0; i < 2; ++i) {
    message.append(kKeys[i], 2);
    message.append(reinterpret_cast<const char*>(&fields[i]), 8);
  }
}

std::optional<ClockStamp> stamp_of(std::string_view message) {
  if (message.size() < 2 * kFieldBytes) return std::nullopt;
  message.remove_prefix(message.size() - 2 * kFieldBytes);
  std::uint64_t fields[2];
  for (int i = 0; i < 2; ++i) {
    const std::string_view field = message.substr(static_cast<std::size_t>(i) * kFieldBytes, kFieldBytes);
    if (!field.starts_with(std::string_view(kKeys[i], 2))) return std::nullopt;
    std::memcpy(&fields[i], field.data() + 2, 8);
  }
  return ClockStamp{fields[0], static_cast<std::int64_t>(fields[1])};
}

void stamp(std::string& message) {
  flight::beat();
  append(message, {flight::clock_id(), SteadyClock().now().time_since_epoch().count()});
}

void hear_stamp(std::string_view message) {
  if (const auto heard = stamp_of(message))
    events::record(events::Kind::heard, {.a = heard->clock, .b = static_cast<std::uint64_t>(heard->sent_ns)});
}

}  // namespace rejoin::daemon
