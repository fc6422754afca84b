// The shared-memory engine. Who moves bytes: the receiver of a write, after it has checked key and range, with
// process_vm_readv, or by copying out of the poster's memfd where the bytes lie in one (Mapping::shareable); of a read,
// the owner of the memory, with process_vm_writev, into the range that the reader asked for.
//
// engine.cc: set-up, connecting, closing, sleeping. datapath.cc: records out and in.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/regions.h"
#include "transport/shm/factory.h"
#include "transport/shm/ring.h"
#include "transport/shm/wire.h"

namespace rejoin::transport::shm {

class ShmEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make();
  ~ShmEngine() override;

  Result<Address> listen(const Address& where) override;
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override { return regions_.remote(region); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;

 private:
  enum class Stage { greeting, accepting, open, failed };

  struct Pending {  // a record that found no room
    wire::Header header;
    Bytes body;
  };
  struct Operation {
    std::uint64_t context = 0;
    RegionId region;
  };
  struct PeerFile {
    std::uint64_t inode = 0;
    Mapping bytes;  // none: it can't be mapped, and is not tried again
  };
  struct Endpoint {
    EndpointId id;
    Stage stage = Stage::greeting;
    std::string failure;
    Fd socket;    // tells when the peer's process ends
    Fd doorbell;  // the peer's
    pid_t pid = 0;
    Mapping channel;
    std::deque<PeerFile> files;  // of the peer, that are mapped; the last one used is the first
    RingWriter out;
    RingReader in;
    std::deque<Pending> pending;
    std::unordered_map<std::uint64_t, Operation> operations;
    std::uint64_t next_operation = 1;
  };

  ShmEngine() = default;
  Result<> start();

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }
  Endpoint& adopt(Fd socket, Stage stage);
  void watch_sockets();
  void accept_all();
  void on_socket(Endpoint& endpoint);
  void greet_as_server(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds);
  void finish_as_client(Endpoint& endpoint, BytesView bytes, std::vector<Fd> fds);
  Result<> probe(const Endpoint& endpoint, const wire::Greeting& greeting) const;
  void open(Endpoint& endpoint);
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why);
  void fail_operations(Endpoint& endpoint, const Error& error);

  // datapath.cc
  void post(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void flush(Endpoint& endpoint);
  bool receive(Endpoint& endpoint);
  void handle(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void on_write(Endpoint& endpoint, const wire::Header& header, BytesView body);
  void on_read(Endpoint& endpoint, const wire::Header& header);
  void on_acknowledge(Endpoint& endpoint, const wire::Header& header);
  bool pull(Endpoint& endpoint, std::byte* target, const wire::Header& header);
  BytesView peer_file(Endpoint& endpoint, const wire::Header& header);
  bool move(Endpoint& endpoint, std::byte* local, std::uint64_t remote, std::uint64_t length, bool pull);

  Fd epoll_, listener_, doorbell_;
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
};

}  // namespace rejoin::transport::shm
