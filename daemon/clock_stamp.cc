#include "daemon/clock_stamp.h"

#include <bit>
#include <cstring>

#include "base/clock.h"
#include "base/events.h"
#include "base/flight.h"

namespace rejoin::daemon {

namespace {

// The keys of fields 1002, 1000 and 1001, each of 64 bits, in the order in which they stand.
constexpr char kKeys[3][2] = {{'\xd1', '\x3e'}, {'\xc1', '\x3e'}, {'\xc9', '\x3e'}};
constexpr std::size_t kFieldBytes = 2 + 8;
static_assert(std::endian::native == std::endian::little, "as protobuf has them");

// The one with this key, which is to be the last but so many.
std::optional<std::uint64_t> last_field(std::string_view message, int key, std::size_t from_end) {
  if (message.size() < from_end * kFieldBytes) return std::nullopt;
  message.remove_prefix(message.size() - from_end * kFieldBytes);
  if (!message.starts_with(std::string_view(kKeys[key], 2))) return std::nullopt;
  std::uint64_t value = 0;
  std::memcpy(&value, message.data() + 2, sizeof value);
  return value;
}

}  // namespace

void append(std::string& message, const ClockStamp& stamp, std::int64_t system_time) {
  const std::uint64_t fields[3] = {static_cast<std::uint64_t>(system_time), stamp.clock,
                                   static_cast<std::uint64_t>(stamp.sent_ns)};
  for (int i = 0; i < 3; ++i) {
    message.append(kKeys[i], 2);
    message.append(reinterpret_cast<const char*>(&fields[i]), 8);
  }
}

std::optional<ClockStamp> stamp_of(std::string_view message) {
  const auto clock = last_field(message, 1, 2), sent_ns = last_field(message, 2, 1);
  if (!clock || !sent_ns) return std::nullopt;
  return ClockStamp{*clock, static_cast<std::int64_t>(*sent_ns)};
}

std::optional<std::int64_t> system_time_of(std::string_view message) {
  const auto time = stamp_of(message) ? last_field(message, 0, 3) : std::nullopt;
  return time ? std::optional(static_cast<std::int64_t>(*time)) : std::nullopt;
}

std::int64_t system_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

void stamp(std::string& message) {
  flight::beat();
  append(message, {flight::clock_id(), SteadyClock().now().time_since_epoch().count()}, system_time());
}

void hear_stamp(std::string_view message) {
  if (const auto heard = stamp_of(message))
    events::record(events::Kind::heard, {.a = heard->clock, .b = static_cast<std::uint64_t>(heard->sent_ns)});
}

}  // namespace rejoin::daemon
