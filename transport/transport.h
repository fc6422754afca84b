// The transport: endpoints, memory regions, one-sided writes with notification, completions by polling.
//
// An Engine belongs to one thread (its progress thread); every call on it comes from there. Nothing blocks.
// poll() reports what happens, in events. Every posted operation ends in exactly one `completed` event, with
// success or an error, also when its endpoint fails or is closed. An error of one endpoint disturbs no other.
//
// Order: messages of one endpoint arrive in the order sent. Writes are not ordered among each other. A write's
// notification comes after all its bytes. A message sent after a write's completion arrives after its bytes.
//
// Fence: when close() has returned, no byte lands here through that endpoint any more, neither of the peer's writes nor
// of reads of ours, whatever the peer does. See "Fence" in docs/design-notes.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/result.h"
#include "device/memory.h"
#include "transport/secret.h"

#pragma GCC visibility push(default)
namespace rejoin::transport {

using device::DmaBuf, device::MemoryKind;

using EndpointId = Id<struct EndpointTag>;  // never reused in an engine
using RegionId = Id<struct RegionTag>;      // never reused in an engine

// What peers may do with a region by its key; flags, as verbs have them. This engine's own operations may read and
// write it in any case.
enum class Access : std::uint8_t { local = 0, remote_read = 1, remote_write = 2 };
constexpr Access operator|(Access a, Access b) {
  return static_cast<Access>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool allows(Access access, Access needed) { return (access | needed) == access; }

// "host:port" for real networks, "sim:N" for the simulated one.
struct Address {
  std::string text;
  Secret secret{};  // of an address to connect to: one of the secrets that set_secrets() was given there
};

// What a peer must know to write into or read from a region of ours. It is plain bytes, to be sent in any message.
struct RemoteRegion {
  std::uint64_t key = 0;     // a capability: unguessable, void after deregistration
  std::uint64_t length = 0;  // bytes
};

// Where a region of ours lies, for peers that can read it in place. It is plain bytes, to be sent in any message.
struct ViewableRegion {
  std::uint64_t address = 0, length = 0;  // bytes
  // The sealed memfd that it lies in, where it does: its descriptor in this process, or -1.
  std::int64_t file = -1;
  std::uint64_t inode = 0, file_offset = 0;
};

struct LocalRange {
  RegionId region;
  std::uint64_t offset = 0;  // bytes from the region's start
};

struct RemoteRange {
  RemoteRegion region;
  std::uint64_t offset = 0;
};

// The local bytes stay unchanged and mapped until the completion.
struct Write {
  std::uint64_t context = 0;  // comes back in the completion
  LocalRange local;
  RemoteRange remote;
  std::uint64_t length = 0;             // bytes; 0 is allowed, for a notification alone
  std::optional<std::uint64_t> notify;  // raises a `written` event at the peer when all bytes are there
  // The peer will not read them soon: where processors copy, they may pass the caches by.
  bool streamed = false;
  bool digested = false;  // the peer will want their digest: the `written` event may bring it
};

struct Read {
  std::uint64_t context = 0;
  LocalRange local;
  RemoteRange remote;
  std::uint64_t length = 0;
  // Every rail that reaches both ends reads all of it, so that it comes behind whatever any of them has written there.
  // For small reads.
  bool on_each_rail = false;
};

enum class EventKind : std::uint8_t {
  connected,  // connect() came through
  accepted,   // a peer connected to us; `message` holds its hello
  message,    // `message` holds the bytes
  written,    // a peer's write with notification landed: `value` is the notification
  completed,  // a write or read of ours ended: `value` is its context
  closed,     // the endpoint failed or the peer closed it; only close() may still be called on it
};

// What a write has brought, where the transport has copied it, and so could take its digest at less cost than whoever
// reads it again.
struct Digested {
  BytesView bytes;  // where they are now
  std::uint64_t digest = 0;
  // Returns the digest if it is of these bytes.
  std::optional<std::uint64_t> of(BytesView those) const {
    return bytes.data() == those.data() && bytes.size() == those.size() ? std::optional(digest) : std::nullopt;
  }
};

struct Event {
  EventKind kind{};
  EndpointId endpoint;
  std::uint64_t value = 0;
  BytesView message;                   // valid until the next poll()
  std::optional<Digested> digested{};  // of a `written` event, of a write that was `digested`
  std::optional<Error> error;
};

// One of several rails, over all peers that are connected.
struct Rail {
  std::uint32_t peers = 0;  // how many peers have it, too, and should be reached by it
  std::uint32_t up = 0;     // how many of them are
};

class Engine {
 public:
  static constexpr std::size_t kMaxMessage = 64 * KiB;
  static constexpr std::size_t kMaxHello = 4 * KiB;

  virtual ~Engine() = default;

  // Accepts connections at `where` (port 0: the system picks one); returns the address that peers can connect to.
  virtual Result<Address> listen(const Address& where) = 0;
  // From now on who connects here has to know one of these secrets; both ends prove it to each other before anything
  // else. Without secrets whoever comes is taken. The simulated network does not look at them, nor does shared memory,
  // where the kernel tells whose process it is.
  virtual void set_secrets(const Secrets&) {}
  // Sets the job's silence, for which a peer may be silent. The deadlines of connections made from now on follow from
  // it: the table under "Settings" in docs/operations.md.
  virtual void set_silence(Duration) {}
  // Whoever owns this engine polls until arm() is true whenever poll() brought anything, and never just stops when it
  // has what it waits for. So what poll() has to answer peers may leave together with what the handlers of its events
  // post.
  virtual void set_polled_on() {}
  // Whether anything can be moved over it now, as far as it knows. Errors: its port is down, its device gone, its
  // address of no interface. That may pass: whoever connects looks again.
  virtual Result<> usable() { return {}; }
  // Starts a connection; ends in `connected` or `closed`. `hello` (at most kMaxHello) reaches the peer with `accepted`.
  virtual Result<EndpointId> connect(const Address& peer, BytesView hello) = 0;

  // The memory must stay mapped until deregister() has returned; from then on nothing lands in it. What is under way in
  // it ends with an error, and with its endpoint where there is no other way. What `access` does not allow is refused:
  // a peer's operation ends with an error there, nothing moves, and refused() counts it.
  virtual Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) = 0;
  // Registers a device's memory. Errors: `unreachable` where this transport or its device can't.
  virtual Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access) {
    return tl::unexpected(Error{ErrorCode::unreachable, "this transport can't reach the " +
                                                            std::to_string(buffer.memory.size()) +
                                                            " bytes of a dma-buf: stage them in host memory"});
  }
  virtual void deregister(RegionId region) = 0;
  // Of a region that is not registered, or not any more: with the key 0, which is that of none.
  virtual RemoteRegion remote(RegionId region) const = 0;
  // Whether what peers write into this region goes through host memory, and is then copied there.
  virtual bool staged(RegionId) const { return false; }
  // Counts peers' operations, or parts of them, that were refused here: void keys, ranges outside a region, no access.
  virtual std::uint64_t refused() const = 0;

  // Copies the bytes and sends them, in order. Refused (nothing sent) above kMaxMessage or on a dead endpoint.
  virtual Result<> send(EndpointId endpoint, BytesView message) = 0;
  // Posts all or, with an error, none: the endpoint is unknown or dead, or a local range lies outside its region
  // or in one that is not registered.
  virtual Result<> write(EndpointId endpoint, std::span<const Write> writes) = 0;
  virtual Result<> read(EndpointId endpoint, std::span<const Read> reads) = 0;

  // Returns how peers find a region of ours to read it in place, for as long as it is registered; nothing where this
  // transport has no way.
  virtual std::optional<ViewableRegion> viewable(RegionId) const { return std::nullopt; }
  // Returns `room.size()` bytes of a peer's region from `offset` on, as they are now: in place where they are mapped
  // here, or else copied into `room`. The view is valid until the next call on this endpoint. Nobody tells when their
  // owner changes them, or what they are worth if it does: the two agree on that by messages. Errors: as read()'s, and
  // where the memory can't be read.
  virtual Result<BytesView> view(EndpointId, const ViewableRegion&, std::uint64_t /*offset*/, std::span<std::byte>) {
    return tl::unexpected(Error{ErrorCode::unreachable, "this transport can't look into a peer's memory"});
  }

  // Makes progress; the events are valid until the next poll().
  virtual std::span<const Event> poll() = 0;
  // To sleep, the caller calls arm(); if it returns true, it waits for event_fd() to become readable (or anything
  // else), and then polls. False: there is something to poll. -1: this engine has no descriptor (simulation).
  virtual bool arm() = 0;
  virtual int event_fd() const = 0;

  // Fences and forgets the endpoint. What was outstanding on it completes with `cancelled` in the next poll().
  virtual void close(EndpointId endpoint) = 0;

  virtual std::vector<Rail> rails() const { return {}; }  // in their order; empty where there is one only
  // Returns the least time in which anything has come back from there, where this transport knows it.
  virtual std::optional<Duration> round_trip(EndpointId) const { return std::nullopt; }
  // Returns, while something is on its way there, a number that changes whenever the peer's machine acknowledges any of
  // it, whatever the peer's process does. Nothing: nothing is on its way, or this transport can't tell.
  virtual std::optional<std::uint64_t> acknowledged(EndpointId) const { return std::nullopt; }
};

}  // namespace rejoin::transport

#pragma GCC visibility pop
