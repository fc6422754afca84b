#include "base/result.h"

namespace rejoin {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid argument";
    case ErrorCode::not_found: return "not found";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::refused: return "refused";
    case ErrorCode::unavailable: return "unavailable";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::cancelled: return "cancelled";
    case ErrorCode::exhausted: return "exhausted";
    case ErrorCode::io: return "i/o error";
    case ErrorCode::unreachable: return "unreachable";
    case ErrorCode::corrupt: return "corrupt";
  }
  return "unknown";
}

}  // namespace rejoin
