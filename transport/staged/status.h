// Errors, as one staged engine tells them to another.
#pragma once

#include "transport/regions.h"
#include "transport/staged/wire.h"

namespace rejoin::transport::staged {

std::optional<Error> error_of(wire::Status status);
wire::Status status_of(Regions::Refusal refusal);
wire::Status status_of(const std::optional<Error>& error);

}  // namespace rejoin::transport::staged
