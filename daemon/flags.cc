#include "daemon/flags.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/flight_setting.h"
#include "base/location.h"
#include "base/log.h"
#include "base/number.h"
#include "base/text.h"
#include "base/unix_socket.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

namespace {

Result<> check_text(const std::string& text) {
  if (is_utf8(text)) return {};
  return fail(ErrorCode::invalid_argument, "'{}' is not text in UTF-8", printable(text, text.size()));
}

// A log's line, a page and a metric name it, each as one line.
Result<> check_name(const std::string& text) {
  constexpr std::size_t longest = 255;  // bytes; messages have no more of it
  if (auto right = check_text(text); !right) return right;
  if (text.size() > longest)
    return fail(ErrorCode::invalid_argument, "'{}…' has {} bytes, and {} are the most", printable(text, 40),
                text.size(), longest);
  if (const std::string shown = printable(text, text.size()); shown != text)
    return fail(ErrorCode::invalid_argument,
                "'{}' has a character that does not print, such as the end of a line: give a name that is one line "
                "without any",
                shown);
  return {};
}

// Of several rails each may have its own.
Result<> check_address(const std::string& text) {
  for (const auto& one : split(text, '|'))
    if (auto parts = transport::SocketAddress::split(one); !parts)
      return one == text ? Result<>(tl::unexpected(parts.error()))
                         : Result<>(fail(parts.error().code, "'{}': {}", text, parts.error().message));
  return {};
}

Result<> check_peer(const std::string& text) {
  const auto parts = transport::SocketAddress::split(text);
  if (!parts) return tl::unexpected(parts.error());
  if (parts->port != 0) return {};
  return fail(ErrorCode::invalid_argument, "address '{}': nobody can be reached at port 0; it is from 1 to 65535",
              text);
}

// `whole`: the setting's value, for errors.
Result<> check_peers(const std::string& text, const std::string& whole) {
  std::set<std::string> all;
  for (const auto& each : split(text, ',')) {
    if (auto right = check_peer(each); !right)
      return each == whole ? right : fail(right.error().code, "'{}': {}", whole, right.error().message);
    if (!all.insert(each).second)
      return fail(ErrorCode::invalid_argument, "'{}' has the address {} twice", whole, each);
  }
  return {};
}

}  // namespace

ValueCheck whole_number(std::uint64_t most) {
  return {"", [most](const std::string& text) -> Result<> {
            if (std::uint64_t number = 0; parse_number(text, number) && number <= most) return {};
            return fail(ErrorCode::invalid_argument, "'{}' is not a whole number from 0 to {}", text, most);
          }};
}

ValueCheck flight_directory() { return {"", flight::check_setting}; }

ValueCheck audit_period() {
  return {"", [](const std::string& text) -> Result<> {
            std::uint64_t steps = 0;
            if (text == "auto" || text == "off" || (parse_number(text, steps) && steps > 0)) return {};
            return fail(ErrorCode::invalid_argument, "'{}' is not auto, off, or a number of steps from 1 on", text);
          }};
}

std::optional<std::pair<ReplicaId, Step>> parse_replica_at_step(std::string_view text) {
  const auto at = text.find('@');
  std::pair<ReplicaId, Step> both{};
  if (at == std::string_view::npos || !parse_number(text.substr(0, at), both.first.value) ||
      !parse_number(text.substr(at + 1), both.second.value))
    return std::nullopt;
  return both;
}

ValueCheck replica_at_step() {
  return {"REPLICA@STEP", [](const std::string& text) -> Result<> {
            if (parse_replica_at_step(text)) return {};
            return fail(ErrorCode::invalid_argument, "'{}' is not REPLICA@STEP, as the job's status says it", text);
          }};
}

std::optional<membership::JobConfig::RollBack> parse_roll_back(std::string_view text) {
  const auto at = text.find('@');
  std::uint64_t to = 0, said_at = 0;
  if (!parse_number(text.substr(0, at), to)) return std::nullopt;
  if (at == std::string_view::npos) return membership::JobConfig::RollBack{Step(to)};
  if (!parse_number(text.substr(at + 1), said_at)) return std::nullopt;
  return membership::JobConfig::RollBack{Step(to), said_at};
}

ValueCheck roll_back_word() {
  return {"STEP@STEPS", [](const std::string& text) -> Result<> {
            const auto word = parse_roll_back(text);
            if (word && (!word->said_at || word->to.value < *word->said_at)) return {};
            if (word)
              return fail(ErrorCode::invalid_argument,
                          "'{}' goes back to no earlier step: the number behind @ counts all steps ever, and is the "
                          "larger one. Write STEP@STEPS as the job's status says it",
                          text);
            return fail(ErrorCode::invalid_argument,
                        "'{}' is not a step, as a number from 0 to {}, or STEP@STEPS, as the job's status says it",
                        text, ~std::uint64_t{0});
          }};
}

ValueCheck number_from_0() {
  return {"", [](const std::string& text) -> Result<> {
            constexpr double most = 1e9;
            if (double number = 0; parse_number(text, number) && number >= 0 && number <= most) return {};
            return fail(ErrorCode::invalid_argument, "'{}' is not a number from 0 to {:.0f}", text, most);
          }};
}

ValueCheck listen_address() { return {"HOST:PORT", check_address}; }

ValueCheck peer_address() { return {"HOST:PORT", check_peer}; }

ValueCheck peer_addresses() {
  return {"HOST:PORT,HOST:PORT…", [](const std::string& text) { return check_peers(text, text); }};
}

ValueCheck store_name() {
  return {"", [](const std::string& text) -> Result<> {
            if (text == "file") return {};
            if (text.starts_with(kEtcd)) {
              for (const auto& each : split(text.substr(kEtcd.size()), ','))
                if (const auto right = lacks_brackets(each))
                  return fail(ErrorCode::invalid_argument,
                              "'{}': {} is not HOST:PORT: an IPv6 address is to be in brackets; write e.g. {}", text,
                              each, *right);
              return check_peers(text.substr(kEtcd.size()), text);
            }
            return fail(ErrorCode::invalid_argument, "'{}' is not file, or etcd:HOST:PORT,HOST:PORT…", text);
          }};
}

ValueCheck job_name() {
  return {"", [](const std::string& text) -> Result<> {
            constexpr std::size_t most = 64;
            const auto allowed = [](unsigned char letter) {
              return std::isalnum(letter) != 0 || letter == '.' || letter == '_' || letter == '-';
            };
            if (!text.empty() && text.size() <= most && std::ranges::all_of(text, allowed)) return {};
            return fail(ErrorCode::invalid_argument, "'{}' is not of 1 to {} letters, digits, '.', '_' and '-'", text,
                        most);
          }};
}

ValueCheck file_name() {
  return {"FILE", [](const std::string& text) -> Result<> {
            if (!text.empty()) return {};
            return fail(ErrorCode::invalid_argument, "no file is named: give its name, or leave the flag out");
          }};
}

ValueCheck advertised_host() {
  return {"HOST", [](const std::string& text) { return transport::check_advertised(text); }};
}

ValueCheck node_name() { return {"", check_name}; }

ValueCheck socket_name() {
  return {"", [](const std::string& text) -> Result<> {
            if (auto right = check_unix_name(text); !right) return right;
            return check_text(text);
          }};
}

ValueCheck location() {
  return {"NAME/NAME…", [](const std::string& text) -> Result<> {
            if (auto right = Location::parse(text); !right) return tl::unexpected(right.error());
            return {};
          }};
}

ValueCheck transport_name() {
  return {"", [](const std::string& text) { return transport::check_name(text); }};
}

ValueCheck log_level() {
  return {"", [](const std::string& text) -> Result<> {
            if (std::ranges::find(kLogLevels, text) != kLogLevels.end()) return {};
            return fail(ErrorCode::invalid_argument, "no log level is called '{}': there are {}", text,
                        fmt::join(kLogLevels, ", "));
          }};
}

ValueCheck or_none(ValueCheck right) {
  return {right.form,
          [check = right.check](const std::string& value) { return value.empty() ? Result<>() : check(value); }};
}

}  // namespace rejoin::daemon
