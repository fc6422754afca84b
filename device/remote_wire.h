// What a remote device asks its server (remote.h), each request and reply a datagram of their socket, and the memory
// that both have mapped. Host byte order: both are on one machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace rejoin::device::remote {

// The memory begins with this.
struct Header {
  std::uint64_t done = 0;         // number of the last copy that is done; written by the GPU, in order
  std::uint64_t needs_flush = 0;  // 1: a NIC's writes must be flushed before the GPU may read them
};
constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kMemoryBytes = 18 * MiB;  // staging's slots both ways, and what the CPU looks at
constexpr std::uint32_t kMostRanges = 512;      // of a request

enum class Kind : std::uint32_t {
  to_host,    // a copy, of one piece: no reply; Header::done tells when it is done
  to_device,  // likewise
  digest,     // of each piece: a reply with the digests
  flush,      // of a NIC's writes: a reply
};
struct Range {
  std::uint64_t address = 0;  // in the device's memory
  std::uint64_t offset = 0;   // of copies: in the memory that both have mapped
  std::uint64_t size = 0;     // bytes
};
// `count` pieces follow. Numbers grow.
struct Request {
  Kind kind{};
  std::uint32_t count = 0;
  std::uint64_t number = 0;
};
// `count` digests of 64 bits follow; or the error's text. After an error nothing is answered any more.
struct Reply {
  std::uint64_t number = 0;  // the request's
  std::uint32_t failed = 0;  // 1: it is an error
  std::uint32_t count = 0;
};

}  // namespace rejoin::device::remote
