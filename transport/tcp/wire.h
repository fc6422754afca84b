// A connection is a stream of frames: a fixed header, then `length` bytes. Both ends are of one byte order (checked
// by the magic of the greetings, which are each side's first frames).
//
// TCP's checksum is 16 bits of a sum, and a bit that flips in a switch or in memory may pass it. Headers and messages
// carry a digest, so that such a bit ends the connection: a length, a key or a step that is wrong is never acted on.
// The bytes of writes are the user's to check.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/digest.h"
#include "transport/regions.h"

namespace rejoin::transport::tcp::wire {

constexpr std::uint64_t kMagic = 0x3350435452455203;  // changes with the layout below
constexpr std::uint64_t kMagicOfEncrypted = kMagic ^ 0xff;
// In a call: this side's kernel can make the records; in a challenge: both sides' kernels do.
constexpr std::uint64_t kByKernel = 1;

// call, challenge, hello: the handshake (transport/handshake.h), with 40, 64, and 32 bytes and the caller's hello.
// Where the connection is to be encrypted the nonces are public keys, the magic is another, and after the hello all is
// in records (records.h).
enum class Kind : std::uint32_t {
  call = 1,
  challenge,
  hello,
  welcome,
  message,
  write,
  acknowledge,
  read_request,
  read_data
};

struct Header {
  Kind kind{};
  std::uint16_t has_notify = 0;
  std::uint16_t more = 0;       // another frame follows at once
  std::uint64_t length = 0;     // bytes that follow; of a read request, bytes wanted
  std::uint64_t operation = 0;  // of the four greetings: the magic
  std::uint64_t key = 0;        // acknowledge: the refusal; call, challenge: kByKernel
  std::uint64_t offset = 0;
  std::uint64_t notify = 0;
  std::uint32_t body_digest = 0;  // of a message or greeting
  std::uint32_t digest = 0;       // of all before it
};
static_assert(sizeof(Header) == 56);

inline std::uint32_t digest_of(BytesView bytes) { return static_cast<std::uint32_t>(digest_of_block(bytes)); }
inline std::uint32_t digest_of_header(const Header& header) {
  return digest_of(bytes_of(header).first(offsetof(Header, digest)));
}

}  // namespace rejoin::transport::tcp::wire
