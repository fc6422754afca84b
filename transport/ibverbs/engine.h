// The verbs engine: one port, and for each endpoint a few reliable-connected queue pairs.
//
//  - A TCP connection beside the queue pairs (the control connection; transport/tcp does it) carries what connects
//    them, and tells at once when the peer's process ends.
//  - A write goes to the queue pair with the least under way; its notification follows it there. Messages take the
//    first queue pair. Nothing relies on an order between queue pairs.
//  - Where both devices place data out of order and both sides want it, all queue pairs but the first are without
//    order: they carry what is long, and its notification takes the first one when all of it is done.
//  - A peer's region is asked for when its key is first used, so that what is out of range, or not allowed, is refused
//    here and costs no queue pair. The peer's device refuses what a peer posts nevertheless.
//  - A queue pair whose request the peer's device refused (a region withdrawn meanwhile) is reset on both sides and
//    connected anew; each side tells what it has received, so that nothing is done twice.
//  - close() destroys the queue pairs: the fence.
//
// engine.cc: set-up, regions, events of the device, closing. connecting.cc: from the first greeting to an open
// endpoint, and rebuilding. datapath.cc: work and completions.
#pragma once

#include <set>
#include <unordered_map>

#include "base/fd.h"
#include "base/seldom.h"
#include "transport/endpoints.h"
#include "transport/epoll.h"
#include "transport/event_queue.h"
#include "transport/ibverbs/connection_manager.h"
#include "transport/ibverbs/removal.h"
#include "transport/ibverbs/wire.h"
#include "transport/regions.h"

namespace rejoin::transport::ibverbs {

class IbverbsEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make(const Options& options);
  ~IbverbsEngine() override;

  Result<Address> listen(const Address& where) override;
  void set_secrets(const Secrets& secrets) override { control_->set_secrets(secrets); }
  void set_silence(Duration silence) override { control_->set_silence(silence); }
  Result<> usable() override { return ready(); }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override { return regions_.remote(region); }
  std::uint64_t refused() const override { return regions_.refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;

 private:
  enum class Stage { connecting, accepting, open, failed };

  struct Operation {
    std::uint64_t context = 0;
    bool is_read = false;
    LocalRange local;
    std::uint64_t key = 0, offset = 0, length = 0;
    std::optional<std::uint64_t> notify;
    std::uint32_t unfinished = 0;  // works on a queue pair without order
  };
  struct RemoteMemory {
    bool known = false;
    std::uint64_t address = 0, length = 0;
    std::uint32_t rkey = 0;
    Access access = Access::local;
    std::vector<std::uint64_t> waiting;  // operations
  };
  struct Endpoint {
    EndpointId id;  // also the control connection's
    Stage stage = Stage::connecting;
    std::string failure;
    bool initiator = false;
    bool announced = false;   // the caller knows of it
    bool by_manager = false;  // connected by rdma_cm, …
    std::uint64_t manager_token = 0;
    std::uint32_t uncalled = 0;  // … with so many queue pairs still to come
    std::vector<std::unique_ptr<QueuePair>> queue_pairs;
    std::vector<bool> rebuilding;  // our own reset of it is announced and not answered
    ibv_gid peer_gid{};
    std::uint16_t peer_lid = 0;
    std::uint32_t peer_mtu = 0;
    std::vector<std::uint32_t> peer_numbers;
    Bytes hello;         // until `accepted`
    MessageParts parts;  // of a caller's message coming in
    SlotMap<Operation> operations;
    std::unordered_map<std::uint64_t, RemoteMemory> memory;  // the peer's, by key
    bool dirty = false;
  };

  explicit IbverbsEngine(const Options& options) : options_(options) {}
  Result<> start();
  // Opens the device and all that belongs to it; again after it was lost, with the regions registered meanwhile.
  Result<> open_device();
  void lose_device();
  Result<> watch_removal();
  // The port as it is now; a device that was lost is looked for again.
  Result<> ready();

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }

  // connecting.cc
  Result<> start_manager();
  void on_manager(const ConnectionManager::Event& event);
  void on_all_connected(Endpoint& endpoint);
  Result<> make_queue_pairs(Endpoint& endpoint, std::uint32_t ordered, std::uint32_t unordered);
  void keep_queue_pairs(Endpoint& endpoint, const std::vector<std::size_t>& which);
  Result<> make_room_for_completions(std::uint32_t more_queue_pairs);
  wire::Greeting greeting(const Endpoint& endpoint) const;
  Result<> connect_queue_pairs(Endpoint& endpoint, const wire::Greeting& peer, bool may_post);
  QueuePair::Peer peer_of(const Endpoint& endpoint, std::size_t queue_pair, std::uint32_t first_packet) const;
  void on_control(const Event& event);
  void on_accepted(const Event& event);
  void on_greeting(Endpoint& endpoint, BytesView message);
  void on_signal(Endpoint& endpoint, BytesView message);
  void send_signal(Endpoint& endpoint, std::size_t queue_pair, wire::Signal signal);
  void opened(Endpoint& endpoint);

  // engine.cc
  void look_at_control();
  void take_device_events();
  void look_at_device();
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, const std::string& why);
  void fail_all(const std::string& why);
  void end_operations(Endpoint& endpoint, const Error& error);
  void drain(std::span<const std::unique_ptr<QueuePair>> queue_pairs);
  void destroy_queue_pairs(Endpoint& endpoint);

  // datapath.cc
  Result<> fill_receives();
  bool take_completions();
  void take_all_completions();
  void poll_completions();
  void on_completion(const ibv_wc& completion);
  void on_received(const ibv_wc& completion);
  void on_send(Endpoint& endpoint, QueuePair& queue_pair, BytesView bytes);
  void check_unsent(Endpoint& endpoint);
  void on_work_failed(Endpoint& endpoint, std::size_t queue_pair, const ibv_wc& completion);
  void on_done(Endpoint& endpoint, const Work& work);
  void finish(Endpoint& endpoint, std::uint64_t operation, const std::optional<Error>& error);
  void start(Endpoint& endpoint, std::uint64_t number, Operation& operation);
  void submit(Endpoint& endpoint, std::uint64_t number, Operation& operation, const RemoteMemory& memory);
  static QueuePair& carrier(Endpoint& endpoint, std::uint64_t length);
  void send_control(Endpoint& endpoint, const wire::Header& header, BytesView rest = {});
  void answer(Endpoint& endpoint, std::uint64_t key);
  void on_answer(Endpoint& endpoint, const wire::Header& header, BytesView rest);
  Result<> reset(Endpoint& endpoint, std::size_t queue_pair);
  void begin_rebuild(Endpoint& endpoint, std::size_t queue_pair);
  void touch(Endpoint& endpoint);
  void post(Endpoint& endpoint);
  void flush();

  const Options options_;
  std::optional<Device> device_;  // none: lost
  bool out_of_order_ = false;     // wanted, and the device can
  bool lost_ = false;
  std::optional<RemovalWatch> removal_;
  std::string removal_of_;  // the address that it is bound to
  const std::string name_ = options_.device;
  Fd epoll_;
  Unguessable unguessable_;
  Regions regions_{unguessable_};
  struct Registered {
    MemoryRegion region;
    std::uint64_t address = 0;
    MemoryKind kind = MemoryKind::host;
    Fd dma_buf;  // our own, where it is one: to register it again with the next device
    std::uint64_t dma_buf_offset = 0;
  };
  // engine.cc
  Result<RegionId> keep(std::span<std::byte> memory, Access access, Registered what);
  Result<> register_with_device(std::span<std::byte> memory, Access access, Registered& what) const;
  std::unordered_map<std::uint64_t, Registered> registered_;          // by our region
  std::unordered_map<std::uint64_t, std::set<EndpointId>> known_to_;  // … the endpoints that asked for it
  std::unique_ptr<Engine> control_;
  std::unique_ptr<ConnectionManager> manager_;
  std::unordered_map<std::uint64_t, EndpointId> by_token_;  // that rdma_cm is to connect
  CompletionChannel channel_;
  CompletionQueue completions_;
  Bytes receive_memory_;
  MemoryRegion receive_region_;
  SharedReceiveQueue receives_;
  std::vector<std::uint32_t> unposted_;  // receive buffers
  SendSlots slots_;
  EventQueue events_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  struct Owner {  // as long as the queue pair exists, so does its endpoint
    Endpoint* endpoint = nullptr;
    std::size_t index = 0;
  };
  std::unordered_map<std::uint32_t, Owner> by_tag_, by_number_;  // queue pairs
  std::uint32_t next_tag_ = 1;
  std::vector<EndpointId> dirty_, flushed_;
  Fifo<ibv_wc> backlog_;  // completions taken and not handled
  struct DeviceEvent {
    ibv_event_type type{};
    EndpointId endpoint;  // whose queue pair it is about; 0: nobody's
  };
  Fifo<DeviceEvent> device_events_;  // taken and not handled
  std::uint32_t polls_ = 0, unopened_ = 0, unacknowledged_ = 0;
  const SteadyClock clock_;
  Seldom refused_{kSameLineAgain};   // connections
  Seldom unfilled_{kSameLineAgain};  // receive buffers
  bool slept_ = false;
};

}  // namespace rejoin::transport::ibverbs
