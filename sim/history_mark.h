// Of which history a plan is: written where daemons and relays pass it on without reading it, for the checkers alone.
#pragma once

#include <optional>
#include <string>

#include "control.pb.h"

namespace rejoin::sim {

// A field that no release has: its number and kind, and how many bytes follow.
inline const std::string kHistoryField = "\xc2\x3e\x01";

inline void mark(proto::Plan& plan, std::size_t history) {
  (void)plan.ParseFromString(plan.SerializeAsString() + kHistoryField + static_cast<char>(history));
}

inline std::optional<std::size_t> mark_of(const proto::Plan& plan) {
  const std::string bytes = plan.SerializeAsString();
  const std::size_t length = kHistoryField.size() + 1;
  if (bytes.size() < length || bytes.compare(bytes.size() - length, kHistoryField.size(), kHistoryField) != 0)
    return std::nullopt;
  return static_cast<unsigned char>(bytes.back());
}

}  // namespace rejoin::sim
