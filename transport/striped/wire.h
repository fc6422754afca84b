// What two striped engines say to each other, over the rails' own messages. Host byte order: all hosts of a job share
// it. In order:
//   1. The caller connects each rail with a Greeting as its hello.
//   2. Over the first rail that is up it sends `hello`, with its user's hello. After that each side may send, numbered:
//   3. `message`: goes to the user.
//   4. `ask` when it first uses a key; `answer` has the region's key on each rail. Then it writes and reads, in pieces.
//   5. `announce` for each write with a notification: the receiver counts its pieces. `withdraw`: it is never complete.
//   6. `rail_down` and then `landed` when a rail has died: the two agree on which of its pieces have arrived.
// Besides, unnumbered: `received`, so that nothing is kept for longer than needed, and `probe` with its `echo`.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace rejoin::transport::striped::wire {

constexpr std::uint64_t kMagic = 0x33656b6972747352;  // "Rstrike3": another layout gets another number

// The rails' hello.
struct Greeting {
  std::uint64_t magic = kMagic;
  std::uint64_t connection[2]{};  // unguessable; the same on all rails
  std::uint32_t rail = 0;
  std::uint32_t generation = 0;  // of this rail in this connection; above 0: the connection must exist
  std::uint32_t rails = 0;       // that the sender has
  std::uint32_t reserved = 0;
};

inline std::string other_number(std::size_t theirs, std::size_t ours) {
  return fmt::format(
      "the peer has {} rail{}, and this process {}: all processes need as many, in the same order; --transport (of the "
      "NCCL plugin REJOIN_NCCL_DEVICES) names their addresses or devices, each with its threads",
      theirs, theirs == 1 ? "" : "s", ours);
}

enum class Kind : std::uint32_t {
  hello,     // the first message: the caller's hello
  message,   // the caller's, or a part of it; a: all writes with notification below this were complete by then
  announce,  // a: number of a write with notification, b: its pieces, c: the notification
  withdraw,  // a: number of a write that will not be complete
  ask,       // a: key of a region
  answer,    // a: the key, then one RailKey for each rail; none: no such region
  // a: rail, b: its generation: fenced at the sender of this, as are those before it, whose own come first where pieces
  // have landed over them; then the tags of the last pieces landed there.
  rail_down,
  // a: rail, b: its generation: ended at the sender of this, who has seen the completions of the pieces whose tags
  // follow. They have landed; where the receiver closed its end with their notifications unread, it counts them now.
  landed,
  // Not numbered, each about the rail it comes over or about all:
  received,  // a: all messages below this number have been received; b: all writes with notification below this are in
  probe,     // to be echoed on this rail: is it alive?
  echo,      // a, b: as with received
};

struct Header {
  Kind kind{};
  std::uint32_t more = 0;  // of a message: another part follows
  std::uint64_t number = 0;
  std::uint64_t a = 0, b = 0, c = 0;
};

struct RailKey {
  std::uint64_t key = 0, length = 0;
  std::uint64_t usable = 0;  // 0: this rail can't reach the region
};

// A piece's notification: which write it belongs to, and which piece it is.
constexpr std::uint64_t kMaxPieces = 1 << 16;
// Tags in one message. A `rail_down` has those of the last so many pieces that have landed over the rail.
constexpr std::size_t kMaxTags = 4096;
// A rail carries pieces that were posted less than so many behind its oldest that is not complete. So what lands behind
// a piece that is not complete was posted less than so many before it or behind it, and the piece is among the tags of
// a `rail_down`. The other half of them is for notifications that are read late.
constexpr std::uint64_t kMaxAhead = kMaxTags / 4;
constexpr std::uint64_t piece_tag(std::uint64_t number, std::uint64_t piece) { return number << 16 | piece; }
constexpr std::uint64_t number_of(std::uint64_t tag) { return tag >> 16; }

}  // namespace rejoin::transport::striped::wire
