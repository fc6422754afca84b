#include "transport/strangers.h"

#include <bit>

#include "base/log.h"
#include "base/refusals.h"

namespace rejoin::transport {

void Strangers::refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why) {
  const bool crowd = greetings_.size() > kMost;
  remove(id);
  if (code == ErrorCode::unavailable) return;
  refusals::count(code == ErrorCode::refused   ? refusals::Why::key
                  : code != ErrorCode::timeout ? refusals::Why::protocol
                  : crowd                      ? refusals::Why::too_many
                                               : refusals::Why::no_proof);
  if (!std::has_single_bit(++refused_)) return;
  spdlog::warn("a data connection{}{} was refused: {} ({} so far)", from.empty() ? "" : " from ", from, why, refused_);
}

}  // namespace rejoin::transport
