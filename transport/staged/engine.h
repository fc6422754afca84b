// The staged engine. The receiver of a write pulls: the poster copies a fragment into a pinned slot and offers it, the
// receiver reads it into a slot of its own and copies it on, and says that it has landed. So each side waits only for
// its own slots, and only the receiver itself puts anything into its memory: closing an endpoint ends that. An end that
// needs no staging is read out of, or into, directly. A read asks its peer to write. Peers pull out of memory that they
// may not read by a key that only who is offered bytes of it has, or out of slots.
//
// engine.cc: set-up, regions, endpoints. transfers.cc: messages, what goes out, copies. pulls.cc: what comes in.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "device/copier.h"
#include "transport/containers.h"
#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/regions.h"
#include "transport/staged/factory.h"
#include "transport/staged/wire.h"

namespace rejoin::transport::staged {

class StagedEngine final : public Engine {
 public:
  StagedEngine(std::unique_ptr<Engine> below, std::shared_ptr<device::Device> device, const Options& options,
               std::shared_ptr<device::Reducer> reducer)
      : options_(options), device_(std::move(device)), reducer_(std::move(reducer)), below_(std::move(below)) {}
  ~StagedEngine() override;
  Result<> start();

  Result<Address> listen(const Address& where) override { return below_->listen(where); }
  void set_secrets(const Secrets& secrets) override { below_->set_secrets(secrets); }
  void set_silence(Duration silence) override { below_->set_silence(silence); }
  void set_polled_on() override { below_->set_polled_on(); }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override;
  bool staged(RegionId region) const override { return !reachable_.contains(region.value); }
  std::uint64_t refused() const override { return regions_.refused() + below_->refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;
  std::vector<Rail> rails() const override { return below_->rails(); }
  std::optional<Duration> round_trip(EndpointId endpoint) const override { return below_->round_trip(endpoint); }
  std::optional<std::uint64_t> acknowledged(EndpointId endpoint) const override {
    return below_->acknowledged(endpoint);
  }

 private:
  static constexpr std::size_t kMaxUnderWay = 1 << 20;  // offers, requests and writes of one peer

  enum class Stage { connecting, accepting, open, failed };
  struct Endpoint {
    EndpointId id;
    Stage stage = Stage::connecting;
    std::string failure;
    Bytes hello;  // of ours, until it is connected
    MessageParts parts;
    std::map<std::uint64_t, std::uint64_t> arriving;  // the peer's writes of several fragments: how many have landed
    std::size_t slots = 0;                            // of ours that hold what it has not taken yet
    std::size_t pulls = 0;                            // offers of its peer that are not answered
  };
  // A write of ours, or one that a peer has asked for; or a read, which the peer works on.
  struct Operation {
    EndpointId endpoint;
    std::uint64_t context = 0;             // the caller's
    std::optional<std::uint64_t> request;  // … or the peer's number of it
    bool is_read = false;
    LocalRange local;
    RemoteRange remote;
    std::uint64_t length = 0;
    std::optional<std::uint64_t> notify;
    std::optional<RegionId> source;  // below, that the peer reads; none: slots
    std::uint64_t fragments = 0, begun = 0, ended = 0;
    std::optional<Error> error;
  };
  struct Offered {  // a fragment of an operation
    std::uint64_t operation = 0;
    std::optional<std::uint32_t> slot;
    bool sent = false;
  };
  struct Pull {  // an offer of a peer's
    EndpointId endpoint;
    wire::Offer offer;
    RegionId target;
    std::uint64_t begun = 0, under_way = 0;  // bytes; fragments
    wire::Status status = wire::Status::done;
  };
  struct Below {                           // an operation of the engine below
    std::optional<std::uint64_t> context;  // the caller's, of one that is handed through
    std::uint64_t pull = 0;
    std::optional<std::uint32_t> slot;
    std::uint64_t offset = 0, length = 0;  // in the pull's bytes
  };
  struct Copy {
    std::uint64_t number = 0;  // of the copier's
    EndpointId endpoint;
    RegionId region;  // of the device's end
    std::uint32_t slot = 0;
    wire::Offer offer;       // going out: to be sent when it is done
    std::uint64_t pull = 0;  // coming in
  };
  struct Lane {  // one direction
    device::Memory pinned;
    RegionId region;                         // of it, below
    std::unique_ptr<device::Copier> copier;  // waits for its copies before `pinned` goes
    std::deque<Copy> copies;
    std::vector<std::uint32_t> free;
    std::uint64_t signalled = 0;  // the copy behind which the eventfd is signalled
    std::byte* at(std::uint32_t slot, std::size_t slot_bytes) { return pinned.bytes.data() + slot * slot_bytes; }
  };

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  struct Reachable {  // a region that needs no staging here
    RegionId below;
    MemoryKind kind{};
    std::optional<RegionId> pulled;  // below, the same memory under a key for those who are to pull out of it
  };
  // The region below that this one is; none: it is staged.
  std::optional<RegionId> below_of(RegionId region) const;
  // The region below that a peer can pull its bytes out of; none: they go through slots.
  Result<std::optional<RegionId>> source_of(RegionId region);
  Result<RegionId> export_and_register(std::span<std::byte> memory, Access access);
  RegionId keep(std::span<std::byte> memory, Access access, const std::optional<Reachable>& reachable);
  Result<RegionId> keep_below(std::span<std::byte> memory, MemoryKind kind, Access access,
                              const std::function<Result<RegionId>()>& register_below);

  void on_event(const Event& event);
  void on_message(Endpoint& endpoint, BytesView bytes);
  void on_offer(Endpoint& endpoint, const wire::Offer& offer);
  Regions::Refusal may_land(const Endpoint& endpoint, const wire::Offer& offer);
  void on_landed(Endpoint& endpoint, const wire::Answer& answer);
  void on_request(Endpoint& endpoint, const wire::Request& request);
  void on_completed(const Event& event);
  void malformed(Endpoint& endpoint, std::string_view what);
  void end(Endpoint& endpoint, const Error& error);
  void fail_endpoint(Endpoint& endpoint, const Error& error);

  // Hands through what both ends of it can be reached for; the rest is left in `staged`.
  template <typename One>
  Result<> hand_through(EndpointId endpoint, std::span<const One> operations, std::vector<const One*>& staged,
                        Result<> (Engine::*verb)(EndpointId, std::span<const One>));
  void post(Operation operation);
  void send_control(EndpointId endpoint, wire::Kind kind, BytesView rest, std::uint32_t more = 0);
  void send_struct(EndpointId endpoint, wire::Kind kind, const auto& what) {
    send_control(endpoint, kind, bytes_of(what));
  }
  void pump();
  bool offer_next(std::uint64_t number);
  bool pull_next(std::uint64_t number);
  void finish_fragment(std::uint64_t operation, const std::optional<Error>& error);
  void complete(std::uint64_t operation);
  void settle_pull(std::uint64_t pull);
  void advance(Lane& lane);
  void finish_copy(Lane& lane, const std::optional<Error>& error);
  void wait_for_copies(const std::function<bool(const Copy&)>& which);

  const Options options_;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<device::Reducer> reducer_;
  Fd eventfd_, epoll_;
  Unguessable unguessable_;
  Lane out_, in_;
  EventQueue events_;
  std::uint64_t operations_made_ = 0, offers_made_ = 0, pulls_made_ = 0;
  Regions regions_{unguessable_};
  std::unordered_map<std::uint64_t, Reachable> reachable_;  // by our region, where it is not staged
  std::map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  std::map<std::uint64_t, Operation> operations_;
  std::map<std::uint64_t, Offered> offered_;
  std::map<std::uint64_t, Pull> pulls_;
  std::deque<std::uint64_t> to_offer_, to_pull_;  // operations; pulls
  SlotMap<Below> below_operations_;
  bool noted_staging_ = false;     // that something is staged
  std::unique_ptr<Engine> below_;  // goes before the memory that it knows
};

}  // namespace rejoin::transport::staged
