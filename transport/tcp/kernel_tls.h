// Records that the kernel makes and opens (kTLS: Linux's module `tls`, for TLS 1.3 and AES-256-GCM). They are those of
// records.h. What it does for a socket it does until the socket ends: Linux before 6.14 can neither change a key nor
// stop.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin::transport::tcp::kernel_tls {

struct Key {
  std::array<std::byte, 32> cipher{};
  std::array<std::byte, 12> iv{};
};
enum class Direction : std::uint8_t { out, in };

// Whether it can be done here, tried once a process over a connection with itself. Errors: `unavailable`, with what is
// missing and the remedy.
const Result<>& available();
// Of a connected socket: what follows goes through the module, unchanged until begin(). Errors: `unavailable`.
Result<> attach(const Fd& socket);
// From the next byte on, in this direction.
Result<> begin(const Fd& socket, Direction direction, const Key& key);
// A record of another kind: what follows is encrypted by this process before the kernel has it. False: not sent, by
// errno.
bool send_handover(const Fd& socket);
// As recvmsg(), without blocking, of application data. `handed_over`: not that, but such a record has come, and went
// into the first bytes of what `message` has room for, four at least. EBADMSG: what came was damaged, or is something
// else.
ssize_t receive(const Fd& socket, msghdr message, bool& handed_over);

}  // namespace rejoin::transport::tcp::kernel_tls
