// Does what NCCL's net interface asks for, over one engine for each device: connections that go one way, receives in
// groups, sends matched to them by tag, all without blocking.
//
// The messages of a connection, in order:
//   1. The sender connects, with Hello as its hello, which names the listener's random number.
//   2. When it is connected it says so, and the listener's accept() gives NCCL the connection.
//   3. The receiver sends a Grant for each group of receives, which says where their bytes may go.
//   4. The sender writes each message there. The write's notification says which receive it was and how long.
// So nothing is buffered, and nothing is copied. Messages match receives in the order in which those were posted; a tag
// chooses within a group.
//
// Threads: NCCL calls from several; each device has one mutex. Every error of a connection shows in the next call on
// it, and NCCL makes it an asynchronous error of its communicator.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/clock.h"
#include "nccl/abi.h"
#include "nccl/devices.h"
#include "transport/containers.h"
#include "transport/transport.h"

namespace rejoin::nccl {

constexpr int kMaxGroup = 8;
constexpr std::size_t kMaxMessage = std::size_t{1} << 30;  // bytes; test() tells sizes in an int
constexpr std::uint64_t kReceives = 64;                    // receives, and flushes, under way on one connection
constexpr std::uint64_t kSends = abi::kMaxRequests * kMaxGroup;

// The bytes of a handle, which a listener gives to who is to connect.
struct Handle {
  std::uint64_t magic = 0;
  std::uint64_t listener[2]{};   // unguessable
  std::uint64_t connecting = 0;  // of who connects, from its first call to its last: the number of its Connecting
  char address[88]{};
  Family family;  // of the listener's device
};
static_assert(sizeof(Handle) == abi::kHandleBytes);

// The hello of a connection.
constexpr std::uint64_t kMagic = 0x316c63636e6a5272;  // "rRjnccl1": another layout gets another number
struct Hello {
  std::uint64_t magic = kMagic;
  std::array<std::uint64_t, 2> listener{};
};

// The bytes of a peer's grant, in a message; an error for what can't be one.
struct Grant {
  struct Buffer {
    transport::RemoteRegion region;
    std::uint64_t offset = 0, size = 0;
    std::int64_t tag = 0;
    std::uint64_t used = 0;
  };
  std::uint64_t number = 0, count = 0;
  std::array<Buffer, kMaxGroup> buffers{};
};
Result<Grant> parse_grant(BytesView message);

class Device;

struct Region {
  transport::RegionId id;
  std::span<std::byte> memory;
  transport::Access access{};
  std::uint64_t uses = 0;
  bool cuda = false;
};

struct Request {
  struct Connection* connection = nullptr;
  enum class Kind { free, send, receive, flush } kind = Kind::free;
  int count = 0, landed = 0;
  std::array<int, kMaxGroup> sizes{};
  std::array<bool, kMaxGroup> in{};
  std::array<std::uint64_t, kMaxGroup> most{};
  std::uint64_t operation = 0;  // the engine's operation, or for a receive the number of its grant
  std::optional<Error> error;
};

struct Connection {  // one way
  std::shared_ptr<Device> device;
  transport::EndpointId endpoint;
  bool sends = false, connected = false;
  std::optional<Error> error;  // why it is of no use any more
  std::deque<Grant> grants;    // the sender's, until they are used up
  std::uint64_t next_grant = 0;
  std::vector<Request> requests;  // never moves
};

struct Listener {
  std::shared_ptr<Device> device;
  std::array<std::uint64_t, 2> id{};
  // A connection until the sender's `connected` message has arrived: NCCL may look at neither side once it has both.
  struct Accepted {
    transport::EndpointId endpoint;
    bool ready = false;
    std::optional<Error> error;  // it has failed since
  };
  std::deque<Accepted> accepted;
  TimePoint looked{};                    // for descriptors, while NCCL waits for a connection
  int lacking = 0;                       // in how many looks in turn somebody could not be accepted without one
  std::uint64_t without_descriptor = 0;  // what the engines had counted at the last look
};

// An engine, and everything of this process that goes over it. The last that uses it destroys it.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Makes one that listens at the address, which is this machine's. The clock must outlive it. Of a family that is
  // told, connections to a handle of another one are refused.
  static Result<std::shared_ptr<Device>> make(std::unique_ptr<transport::Engine> engine, const std::string& address,
                                              const Clock& clock, const Family& family = {});
  ~Device();

  Result<std::unique_ptr<Listener>> listen(Handle& handle);
  // These two return null where there is no connection yet; NCCL calls again. A connection that a busy listener has
  // turned away, or that nobody answers, is begun again. One for which nobody calls any more is given up. accept()
  // fails where this process has had no descriptor for somebody who calls for some seconds (`exhausted`).
  Result<std::unique_ptr<Connection>> connect(Handle& handle);
  Result<std::unique_ptr<Connection>> accept(Listener& listener);
  enum class Use { send, receive };
  Result<Region*> add_region(Use use, std::span<std::byte> memory, bool cuda, const transport::DmaBuf* dma_buf);
  void remove_region(Region* region);
  // Returns null where there is no room or no receive for it now; NCCL calls again.
  Result<Request*> send(Connection& connection, std::span<std::byte> data, int tag, const Region& region);
  struct Target {
    std::span<std::byte> memory;
    int tag = 0;
    const Region* region = nullptr;
  };
  Result<Request*> receive(Connection& connection, std::span<const Target> targets);
  Result<Request*> flush(Connection& connection, std::span<const Target> targets);
  Result<bool> test(Request& request, int* sizes);  // true: done, and the request is NCCL's no more
  void close(Listener& listener);
  void close(Connection& connection);
  // Every connection under way is nobody's any more. Each holds on to its device until then.
  void give_up_all();
  // Nobody calls any more: its engine ends, with its threads and all that has not been closed.
  void end();

 private:
  // A caller that asks a listener whose address is too long for a handle.
  struct Asking {
    transport::EndpointId control;
    std::string address;
    std::optional<Error> error;
  };
  struct Connecting {
    std::unique_ptr<Connection> connection;
    std::optional<Asking> asking;
    int tries = 0;       // that have failed
    TimePoint try_at{};  // none is under way: when the next one begins
    TimePoint asked{};   // when NCCL last called
  };

  Device(const Clock& clock, const Family& family) : clock_(clock), family_(family) {}
  Result<> open_control();
  void progress();
  void progress_control();
  Result<> look_for_descriptors(Listener& listener) const;
  void on_event(const transport::Event& event);
  void on_event_of_accepted(const transport::Event& event);
  void on_written(Connection& connection, std::uint64_t value);
  Result<> connect_to_self();
  void give_up_forgotten();
  Result<Connecting*> find_connecting(Handle& handle);
  Result<> begin_try(Connecting& connecting, const Handle& handle);
  Result<> go_on(Connecting& connecting, const Handle& handle);
  void end_try(Connecting& connecting);
  Result<> begin_connection(Connecting& connecting, const Handle& handle, const std::string& address);
  void fail_connection(Connection& connection, const Error& error);
  Request* take_request(Connection& connection, Request::Kind kind);

  const Clock& clock_;
  const Family family_;
  std::mutex mutex_;
  std::unique_ptr<transport::Engine> engine_;
  std::unique_ptr<transport::Engine> control_;  // where an address is too long for a handle, here or at a peer
  transport::Address address_, control_address_;
  std::unordered_map<std::uint64_t, Connection*> connections_;  // by endpoint
  std::map<std::array<std::uint64_t, 2>, Listener*> listeners_;
  std::map<std::uint64_t, Asking*> asking_;                          // by control endpoint
  std::map<std::uint64_t, std::unique_ptr<Connecting>> connecting_;  // by number
  transport::SlotMap<Request*> operations_;
  std::multimap<std::byte*, std::unique_ptr<Region>> regions_;  // by where they begin
  // A connection to itself, for flushes: a read through the device sees all that the device has written.
  transport::EndpointId loop_;
  bool loop_ready_ = false;
  std::array<std::uint64_t, 2> loop_id_{};
  std::array<std::byte, 64> scratch_{};
  transport::RegionId scratch_region_;
};

}  // namespace rejoin::nccl
