#include "transport/staged/status.h"

namespace rejoin::transport::staged {

std::optional<Error> error_of(wire::Status status) {
  switch (status) {
    case wire::Status::done: return std::nullopt;
    case wire::Status::bad_key: return refusal_error(Regions::Refusal::bad_key);
    case wire::Status::bad_range: return refusal_error(Regions::Refusal::bad_range);
    case wire::Status::no_remote_read: return refusal_error(Regions::Refusal::no_remote_read);
    case wire::Status::no_remote_write: return refusal_error(Regions::Refusal::no_remote_write);
    case wire::Status::withdrawn: return Error{ErrorCode::cancelled, "the peer withdrew its memory in mid-transfer"};
    case wire::Status::device_failed: return Error{ErrorCode::io, "the peer's device failed to copy"};
    case wire::Status::not_read: return Error{ErrorCode::unavailable, "the peer could not read what it was offered"};
  }
  return Error{ErrorCode::corrupt, "the peer answered with an unknown status"};
}

wire::Status status_of(Regions::Refusal refusal) {
  switch (refusal) {
    case Regions::Refusal::none: return wire::Status::done;
    case Regions::Refusal::bad_key: return wire::Status::bad_key;
    case Regions::Refusal::bad_range: return wire::Status::bad_range;
    case Regions::Refusal::no_remote_read: return wire::Status::no_remote_read;
    case Regions::Refusal::no_remote_write: return wire::Status::no_remote_write;
  }
  return wire::Status::bad_key;
}

wire::Status status_of(const std::optional<Error>& error) {
  if (!error) return wire::Status::done;
  switch (error->code) {
    case ErrorCode::refused: return wire::Status::bad_key;
    case ErrorCode::cancelled: return wire::Status::withdrawn;
    case ErrorCode::io: return wire::Status::device_failed;
    default: return wire::Status::not_read;
  }
}

}  // namespace rejoin::transport::staged
