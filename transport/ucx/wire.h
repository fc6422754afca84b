// What goes over a UCX active message. Both ends are of one byte order (checked by the hello's magic).
#pragma once

#include <cstdint>

#include "transport/regions.h"

namespace rejoin::transport::ucx::wire {

constexpr std::uint64_t kMagic = 0x31304e494f4a4552;  // "REJOIN01": changes with the layout below

enum Kind : unsigned { hello = 1, welcome, goodbye, message, write, acknowledge, read_request, read_data };

// `to` is the receiver's id of this endpoint, learned in hello and welcome; an unknown one is dropped and counted.
// A hello's body is the sender's UCX address, then the user's bytes.
struct Hello {
  std::uint64_t magic;
  std::uint64_t from;  // the sender's id of the endpoint
  std::uint64_t to;    // of a welcome
  std::uint64_t address_length;
};

struct Goodbye {
  std::uint64_t to;
};

struct Message {
  std::uint64_t to;
  std::uint64_t sequence;
};

struct Write {
  std::uint64_t to;
  std::uint64_t operation;  // echoed in the acknowledgement
  std::uint64_t key;
  std::uint64_t offset;
  std::uint64_t length;
  std::uint64_t notify;
  std::uint64_t has_notify;
};

struct Acknowledge {
  std::uint64_t to;
  std::uint64_t operation;
  Regions::Refusal refusal;
};

struct ReadRequest {
  std::uint64_t to;
  std::uint64_t operation;
  std::uint64_t key;
  std::uint64_t offset;
  std::uint64_t length;
};

struct ReadData {
  std::uint64_t to;
  std::uint64_t operation;
  std::uint64_t length;
};

}  // namespace rejoin::transport::ucx::wire
