// What two verbs engines say to each other. Host byte order: all hosts of a job share it. In order:
//   1. Over the control connection (TCP) the caller sends its Greeting and hello. The listener answers with its
//   Greeting,
//      or by `by_manager` with where rdma_cm listens, and there the caller connects the queue pairs.
//   2. When its queue pairs can receive, the caller sends Control `ready`: the connection is up.
//   3. Over the queue pairs go sends, each with a Header. `message`: goes to the user. `ask`, when a key is first used;
//      the region's owner answers with `answer`, and sends `withdraw` when the region is no more. `written` follows a
//      write that notifies.
//   4. When a queue pair has failed, its two ends exchange Control `rebuild`, `rebuilt` and `go`, and it goes on.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace rejoin::transport::ibverbs::wire {

constexpr std::uint64_t kMagic = 0x34627276'6e4a5252;  // another layout gets another number
constexpr std::uint32_t kMaxQueuePairs = 8;

// Over the control connection (TCP), first by the side that connects (its hello follows), then as the answer.
struct Greeting {
  std::uint64_t magic = kMagic;
  std::uint8_t gid[16]{};
  std::uint16_t lid = 0;
  std::uint16_t queue_pairs = 0;
  std::uint32_t mtu = 0;  // bytes
  // First those that keep order, then those that place data out of order. Offered by the side that connects; the answer
  // takes all of the first kind, or the first of them and all of the second kind.
  std::uint32_t numbers[2 * kMaxQueuePairs]{};
  std::uint32_t first_packets[2 * kMaxQueuePairs]{};
  std::uint16_t unordered = 0;  // of the second kind; queue_pairs: of the first
  // By rdma_cm instead: the side that connects wants it so; the answer says where to call, and what to say there.
  std::uint8_t by_manager = 0;
  char manager_address[47]{};
  std::uint16_t manager_port = 0;
  std::uint64_t manager_token = 0;
};

// Over the control connection, after the greetings.
enum class Signal : std::uint32_t {
  ready,    // the side that connected can receive
  rebuild,  // this queue pair had an error and was reset; its first packet will be `first_packet`
  rebuilt,  // the answer: so is ours, with its own
  go,       // and now both can receive
};
struct Control {
  Signal signal{};
  std::uint32_t queue_pair = 0;
  std::uint32_t first_packet = 0;
  std::uint32_t unused = 0;
  std::uint64_t received = 0;  // of sends on this queue pair: all below this number
};

// At the front of every send.
enum class Kind : std::uint32_t {
  message,   // the caller's, or a part of it; extra: another part follows
  written,   // a: the notification of a write that this one follows on the same queue pair
  ask,       // a: key of a region
  answer,    // a: key, b: address, c: length, extra: rkey, and behind it an Access; length 0: no such region
  refused,   // a: a Regions::Refusal, by what `answer` has said: an operation that was not posted, to be counted
  withdraw,  // a: key of a region that is no more
  nothing,   // holds the number of one that was cancelled
};
struct Header {
  Kind kind{};
  std::uint32_t extra = 0;
  std::uint64_t number = 0;  // of this send on its queue pair
  std::uint64_t a = 0, b = 0, c = 0;
};

}  // namespace rejoin::transport::ibverbs::wire
