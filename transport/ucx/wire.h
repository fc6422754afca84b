// What goes over a UCX active message. Both ends are of one byte order (checked by the magic of Call and
// Challenge).
#pragma once

#include <cstdint>

#include "base/proof.h"
#include "transport/regions.h"

namespace rejoin::transport::ucx::wire {

constexpr std::uint64_t kMagic = 0x33304e494f4a4552;  // "REJOIN03": changes with the layout below

enum Kind : unsigned {
  call = 1,
  challenge,
  hello,
  welcome,
  goodbye,
  message,
  write,
  acknowledge,
  read_request,
  read_data
};

// `to` is the receiver's id of this endpoint, learned in call and challenge; what is for an unknown one is dropped.

// The caller's first message (see transport/handshake.h). Its body is the caller's UCX address.
struct Call {
  std::uint64_t magic;
  std::uint64_t from;    // the caller's id of the endpoint
  std::uint64_t secret;  // its name
  Nonce nonce;
};

// The listener's answer.
struct Challenge {
  std::uint64_t to;
  std::uint64_t magic;
  std::uint64_t from;
  Nonce nonce;
  Mac proof;
};

// The caller proves itself. The body is the user's hello.
struct Hello {
  std::uint64_t to;
  Mac proof;
};

// The caller is taken.
struct Welcome {
  std::uint64_t to;
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
