// The shared-memory engine. Whoever is to have the bytes moves them, inside its own poll(): the receiver of a write,
// after it has checked key and range, and the reader, when the owner has checked them and answered where they lie; with
// process_vm_readv, or by copying out of the other's memfd where the bytes lie in one (Mapping::shareable). So nobody
// writes into another's memory. Who lets its memory be read and takes it back says so (Ring::recalls): what was read
// meanwhile does not count.
//
// engine.cc: set-up, connecting, closing, sleeping. datapath.cc: records out and in. peer_process.h: reading
// at the peer.
#pragma once

#include <unistd.h>

#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/acceptor.h"
#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/regions.h"
#include "transport/shm/peer_process.h"
#include "transport/shm/ring.h"
#include "transport/shm/wire.h"
#include "transport/strangers.h"
#include "transport/unsent.h"

namespace rejoin::transport::shm {

constexpr std::uint64_t kListener = 0, kDoorbell = 1, kRoom = 2;  // epoll tags; endpoint ids are larger

class ShmEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make();
  ~ShmEngine() override;

  Result<Address> listen(const Address& where) override;
  void set_silence(Duration silence) override {
    strangers_.set_silence(silence);
    calls_.set_silence(silence);
  }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override { return regions_.remote(region); }
  std::uint64_t refused() const override { return regions_.refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::optional<ViewableRegion> viewable(RegionId region) const override;
  Result<BytesView> view(EndpointId endpoint, const ViewableRegion& where, std::uint64_t offset,
                         std::span<std::byte> room) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;

 private:
  enum class Stage { greeting, accepting, open, failed };

  struct Pending {  // a record that found no room
    wire::Header header;
    Bytes body;
    std::size_t counted = 0;  // in the endpoint's `unsent`
  };
  struct Operation {
    std::uint64_t context = 0;
    RegionId region;
    std::optional<Read> read;
    std::uint64_t placed = 0;  // bytes of the read, before those that were asked for last
    bool withdrawn = false;  // the region has gone, and the completion was reported: only the peer's answer is missing
  };
  struct PeerFile {
    std::uint64_t inode = 0;
    Mapping bytes;
  };
  struct Endpoint {
    EndpointId id;
    Stage stage = Stage::greeting;
    std::string failure;
    std::optional<Error> hung_up;  // the peer has; what it had written before is still taken
    Fd socket;                     // tells when the peer's process ends
    Fd doorbell;                   // the peer's
    PeerProcess process;
    TimePoint seen_up{};  // its process, which had its number then
    Mapping channel;
    std::deque<PeerFile> files;  // of the peer, that are mapped; the last one used is the first
    RingWriter out;
    RingReader in;
    std::deque<Pending> pending;
    Unsent unsent;
    std::unordered_map<std::uint64_t, Operation> operations;
    std::uint64_t next_operation = 1;
    std::unordered_set<std::uint64_t> read_from;  // regions of ours whose address the peer has been given
    // Of the record at the front of `in`, where its bytes take more than one turn: it, and how many are in their place.
    std::optional<wire::Header> front;
    std::uint64_t moved = 0;
  };

  ShmEngine() = default;
  Result<> start();

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }
  Result<Endpoint*> adopt(Fd socket, Stage stage);
  void watch_sockets();
  void accept_all();
  void look_after_greetings();
  void on_socket(Endpoint& endpoint);
  void greet_as_server(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds);
  void refuse(Endpoint& caller, const Error& why);
  static std::optional<std::string> told_by_listener(Endpoint& endpoint);
  void finish_as_client(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds);
  void let_peers_read();
  wire::Greeting greeting_of_ours() const;
  static Result<> probe(Endpoint& endpoint, const wire::Greeting& greeting);
  Result<> check_readable() const;
  Result<> set_doorbell(Endpoint& endpoint, Fd doorbell) const;
  void open(Endpoint& endpoint);
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why);
  void hang_up_on(Endpoint& endpoint);
  void fail_operations(Endpoint& endpoint, const Error& error);

  // datapath.cc
  void post(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void check_unsent(Endpoint& endpoint);
  void flush(Endpoint& endpoint);
  bool receive(Endpoint& endpoint);
  void handle(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void on_write(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void on_read(Endpoint& endpoint, const wire::Header& header);
  void on_found(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void ask(Endpoint& endpoint, std::uint64_t operation, const Read& read, std::uint64_t placed);
  void answer(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal);
  void point_at(wire::Header& header, BytesView& body, const LocalRange& range);
  void on_acknowledge(Endpoint& endpoint, const wire::Header& header);
  // What a turn has done for a record.
  struct Fetched {
    bool whole = true;  // or more is to be moved
    std::optional<Digested> digested;
  };
  Result<Fetched> fetch(Endpoint& endpoint, const wire::Header& header, BytesView body, std::byte* target);
  struct RemoteAddress {  // of bytes of the peer's: in its memory, and in its file if there is one
    std::uint64_t address = 0;
    std::int64_t file = -1;
    std::uint64_t inode = 0, offset = 0;
  };
  Result<> read_memory(Endpoint& endpoint, std::uint64_t address, std::span<std::byte> target);
  BytesView in_place(Endpoint& endpoint, const RemoteAddress& remote, std::uint64_t length);
  BytesView peer_file(Endpoint& endpoint, const RemoteAddress& remote);

  Fd epoll_, listener_, doorbell_;
  Fd room_;  // a timer: when to look again whether there is room for what is pending
  const SteadyClock clock_{};
  const pid_t process_ = ::getpid();
  Acceptor acceptor_{kListener};
  Strangers strangers_;  // processes of this user that have not greeted
  Greetings calls_;      // of ours, from connect() on
  std::string name_;
  std::uint64_t probe_ = wire::kMagic;  // peers read it to see whether they may read us
  Unguessable unguessable_;
  Regions regions_{unguessable_};
  std::unordered_map<std::uint64_t, SharedFile> files_;  // that regions lie in
  EventQueue events_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  std::vector<Endpoint*> open_;  // polled in turn
  std::uint32_t polls_ = 0;
  std::size_t first_ = 0;    // in open_, of this poll's turn
  std::uint64_t moved_ = 0;  // bytes, in this poll
  bool slept_ = false;
  bool has_private_memory_ = false;  // a region that is no file's
  bool readable_ = true;             // … which peers may read, as far as the filter of system calls goes
};

}  // namespace rejoin::transport::shm
