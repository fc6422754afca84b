#include "transport/strangers.h"

#include <bit>

#include "base/log.h"

namespace rejoin::transport {

void Strangers::refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why) {
  remove(id);
  if (code == ErrorCode::unavailable || !std::has_single_bit(++refused_)) return;
  spdlog::warn("a data connection{}{} was refused: {} ({} so far)", from.empty() ? "" : " from ", from, why, refused_);
}

}  // namespace rejoin::transport
