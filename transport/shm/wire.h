// What two shm engines say to each other. In order:
//   1. Over the unix socket the caller sends its Greeting, with the channel's memfd and its doorbell, and then its
//   hello;
//      the listener answers with its own Greeting and doorbell. After that the socket only shows that both ends live.
//      One that refuses says why in its ring, in a record `refused`, and closes; older ones only close, and older
//      callers don't look.
//   2. All else goes through the rings, in records: a header, then the bytes of a message or of a small write.
//      message: goes to the user.
//      write: the receiver moves the bytes into place, and answers with `acknowledge`, which has the refusal if any.
//      read: the owner checks key and range, and answers with `found`, which says where the bytes lie, or with
//      `acknowledge`, which refuses. The reader then moves them.
#pragma once

#include <cstdint>

#include "transport/regions.h"

namespace rejoin::transport::shm::wire {

constexpr std::uint64_t kMagic = 0x345045524d485352;  // changes with the layout below

enum class Kind : std::uint32_t { message = 1, write, acknowledge, read, found, refused };

constexpr std::size_t kLongestRefusal = 1 * KiB;  // in words

constexpr std::uint16_t kStreamed = 1;  // whoever copies them may pass its caches by
constexpr std::uint16_t kDigested = 2;  // and is to take their digest, if it does

struct Header {
  Kind kind{};
  std::uint16_t has_notify = 0;
  std::uint16_t copy_flags = 0;  // of a write: kStreamed, kDigested
  std::uint64_t length = 0;      // bytes to move
  std::uint64_t operation = 0;
  std::uint64_t key = 0;  // acknowledge: the refusal
  std::uint64_t offset = 0;
  std::uint64_t notify = 0;
  // Where the bytes of a write, or of a read that was found to be right, lie in the sender's memory; 0 where they
  // follow the header.
  std::uint64_t address = 0;
  // The same bytes of a sealed memfd, where they lie in one: its descriptor in the sender's process, or -1.
  std::int64_t file = -1;
  std::uint64_t inode = 0, file_offset = 0;
  std::uint64_t recalls = 0;  // found: Ring::recalls when the bytes were there
};

// Over the unix socket, once each way. The client's comes with the channel's memfd and its doorbell, the server's with
// its doorbell.
struct Greeting {
  std::uint64_t magic = kMagic;
  std::uint64_t probe_address = 0;   // holds kMagic: the other side reads it to see whether it may
  std::uint32_t private_memory = 0;  // some of its regions are no file's: only that way can they be read
  std::int32_t probe_file = -1;      // a descriptor of the sender's, likewise for its files
  std::uint64_t hello_length = 0;
};

}  // namespace rejoin::transport::shm::wire
