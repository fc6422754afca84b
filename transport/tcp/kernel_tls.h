// Has the kernel make and open the records of records.h (kTLS: Linux's module `tls`, for TLS 1.3 and AES-256-GCM). It
// does so until the socket ends: Linux before 6.14 can neither change a key nor stop.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin::transport::tcp::kernel_tls {

constexpr std::byte kApplicationData{23};  // the kind of a TLS record

struct Key {
  std::array<std::byte, 32> cipher{};
  std::array<std::byte, 12> iv{};
};
enum class Direction : std::uint8_t { out, in };

// Says whether the kernel can do it, which is tried once a process over a connection with itself. Errors:
// `unavailable`, with what is missing and the remedy.
const Result<>& available();
// Attaches the module to a connected socket. What follows goes through it, unchanged until begin(). Errors:
// `unavailable`.
Result<> attach(const Fd& socket);
// Has the kernel encrypt, or decrypt, from the next byte on in this direction.
Result<> begin(const Fd& socket, Direction direction, const Key& key);
// Sends the record of another kind, which says that this process encrypts what follows before the kernel has it.
// Returns false where it was not sent; errno says why.
bool send_handover(const Fd& socket);
// Receives application data as recvmsg() does, without blocking. `handed_over`: such a record has come instead, and
// went into the first bytes of `message`, which has room for four at least. EBADMSG: what came was damaged or is
// something else.
ssize_t receive(const Fd& socket, msghdr message, bool& handed_over);

}  // namespace rejoin::transport::tcp::kernel_tls
