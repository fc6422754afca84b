// A connection is a stream of frames: a fixed header, then `length` bytes. Both ends are of one byte order (checked
// by the magic of the hello, which is each side's first frame).
#pragma once

#include <cstdint>

#include "transport/regions.h"

namespace rejoin::transport::tcp::wire {

constexpr std::uint64_t kMagic = 0x3250435452455201;  // changes with the layout below

enum class Kind : std::uint32_t { hello = 1, welcome, message, write, acknowledge, read_request, read_data };

struct Header {
  Kind kind{};
  std::uint16_t has_notify = 0;
  std::uint16_t more = 0;       // another frame follows at once
  std::uint64_t length = 0;     // bytes that follow; of a read request, bytes wanted
  std::uint64_t operation = 0;  // hello, welcome: the magic
  std::uint64_t key = 0;        // acknowledge: the refusal
  std::uint64_t offset = 0;
  std::uint64_t notify = 0;
};
static_assert(sizeof(Header) == 48);

}  // namespace rejoin::transport::tcp::wire
