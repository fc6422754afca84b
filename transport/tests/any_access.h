// What tests register memory with where its access is not what they are about.
#pragma once

#include "transport/transport.h"

namespace rejoin::transport {

constexpr Access kAnyAccess = Access::remote_read | Access::remote_write;

}  // namespace rejoin::transport
