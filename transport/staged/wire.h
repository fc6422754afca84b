// What two staged engines say to each other, over the messages of the engines below. Host byte order: all hosts of a
// job share it. In order:
//   1. The Greeting is the hello of the connection below.
//   2. The caller's first message is `hello`, with its user's hello. After that each side may send:
//   3. `message`: goes to the user.
//   4. `offer`: a fragment of a write lies ready in a slot. The receiver reads it, copies it to its region, and answers
//      `landed`. `withdrawn`: no more fragments of that write come.
//   5. `request`: the receiver is to write what is asked for, by offers or directly; that is a read. `answered` follows
//      the last byte.
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace rejoin::transport::staged::wire {

constexpr std::uint64_t kMagic = 0x3264656761747352;  // "Rstaged2": another layout gets another number

struct Greeting {
  std::uint64_t magic = kMagic;
};

enum class Kind : std::uint32_t { hello, message, offer, landed, request, answered, withdrawn };

struct Header {
  Kind kind{};
  std::uint32_t more = 0;  // of a message: another part follows
};

enum class Status : std::uint64_t {
  done,
  bad_key,
  bad_range,
  withdrawn,
  device_failed,
  not_read,
  no_remote_read,
  no_remote_write
};

// Bytes lie ready to be read, and are to go to a region of the receiver's. `landed` answers it.
struct Offer {
  std::uint64_t number = 0;     // the sender's
  std::uint64_t write = 0;      // which of the sender's writes it is a fragment of
  std::uint64_t fragments = 0;  // … of how many
  std::uint64_t notifies = 0, notification = 0;
  std::uint64_t answers = 0;  // the receiver's request that it is the answer to, which needs no remote write; 0: none
  RemoteRegion source;
  std::uint64_t source_offset = 0;
  RemoteRegion target;
  std::uint64_t target_offset = 0, length = 0;
  std::uint64_t write_offset = 0, write_length = 0;  // of the whole write in the target: nothing of a bad one lands
};

// The receiver of this is to write out of a region of its own into one of the sender's: a read. `answered` follows the
// last byte.
struct Request {
  std::uint64_t number = 0;
  RemoteRegion source;
  std::uint64_t source_offset = 0;
  RemoteRegion target;
  std::uint64_t target_offset = 0, length = 0;
};

// To an offer or a request; or `withdrawn`: no more fragments of the write come.
struct Answer {
  std::uint64_t number = 0;
  Status status{};
};

// Keys of staged regions begin with this, all others with something else.
constexpr std::uint64_t kStagedKey = 0x57a9;
constexpr bool is_staged(std::uint64_t key) { return key >> 48 == kStagedKey; }

}  // namespace rejoin::transport::staged::wire
