// What two ends prove with that they know the same key, without showing it: nonces, and HMAC-SHA256 over them.
#pragma once

#include <array>
#include <initializer_list>

#include "base/bytes.h"

namespace rejoin {

using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;

// OpenSSL stays usable while the process ends, for threads that live as long as it; where the process has not used
// OpenSSL before.
void keep_openssl();
Nonce make_nonce();                                                 // of the system's random numbers
Mac mac_of(BytesView key, std::initializer_list<BytesView> parts);  // of the parts, one after the other
bool equal_in_constant_time(BytesView a, BytesView b);

}  // namespace rejoin
