// One process's engine on the simulated fabric.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <vector>

#include "transport/regions.h"
#include "transport/sim/fabric.h"

namespace rejoin::transport::sim {

class SimEngine final : public Engine {
 public:
  SimEngine(Fabric& fabric, std::uint32_t number) : fabric_(fabric), number_(number) {}
  ~SimEngine() override;

  Result<Address> listen(const Address& where) override;
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override;
  std::uint64_t refused() const override { return refused_; }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::optional<ViewableRegion> viewable(RegionId region) const override;
  Result<BytesView> view(EndpointId endpoint, const ViewableRegion& where, std::uint64_t offset,
                         std::span<std::byte> room) override;
  std::span<const Event> poll() override;
  bool arm() override { return pending_.empty(); }
  int event_fd() const override { return -1; }
  void close(EndpointId endpoint) override;
  std::optional<Duration> round_trip(EndpointId endpoint) const override;
  std::optional<std::uint64_t> acknowledged(EndpointId endpoint) const override;

 private:
  friend class Fabric;

  struct Endpoint {
    std::uint32_t peer_engine = 0;
    EndpointId peer;
    bool connected = false;
    bool failed = false;
    TimePoint last_message{};                                                 // keeps messages in order
    std::shared_ptr<std::size_t> unheard = std::make_shared<std::size_t>(0);  // bytes of messages, see Fabric::Held
    std::set<std::uint64_t> outstanding;
    std::map<std::uint64_t, std::uint64_t> contexts;  // operation → the caller's context
    bool forgotten = false;                           // see Fabric::forget()
    std::deque<TimePoint> acknowledgements;           // when they come, of what was sent, in its order
    std::uint64_t acknowledged = 0;                   // … of those that have come
  };
  struct Region {
    std::span<std::byte> memory;
    std::uint64_t key = 0;
    Access access = Access::local;
  };
  struct Queued {
    Event event;
    Bytes message;
    std::shared_ptr<void> weight;  // what it adds to its sender's `unheard` while it lives
  };

  enum class Direction { write, read };
  void start(EndpointId endpoint, Direction direction, const Write& what);
  struct OnItsWay : Write {  // or a read
    std::uint32_t from = 0, to = 0;
    EndpointId endpoint, peer;  // its ends
    std::uint64_t operation = 0;
    Direction direction{};
    std::optional<Bytes> left;  // what its poster's memory held then
  };
  static void land(Fabric& fabric, OnItsWay moved);
  // Errors: those of a refusal; nothing has moved then. Sets `digested` where a transport that copies would.
  std::optional<Error> take_bytes(const SimEngine* sender, const OnItsWay& moved, std::optional<Digested>& digested);
  Regions::Refusal refusal_of(const OnItsWay& moved);
  Result<> check(EndpointId endpoint, const LocalRange& local, std::uint64_t length) const;
  void complete(EndpointId endpoint, std::uint64_t operation, std::optional<Error> error);
  void fail_endpoint(EndpointId endpoint, const std::string& why);
  Region* region_of_key(std::uint64_t key);
  void emit(Event event, Bytes message = {}, std::shared_ptr<void> weight = {}) {
    pending_.push_back({std::move(event), std::move(message), std::move(weight)});
  }
  Endpoint* open(EndpointId id);
  void expect_acknowledgement(Endpoint& endpoint, Duration there);

  Fabric& fabric_;
  const std::uint32_t number_;
  bool listening_ = false;
  bool dead_ = false;
  bool stopped_ = false;
  std::uint64_t refused_ = 0;
  bool damage_ = false;              // the next write that lands here
  std::uint64_t refuse_memory_ = 0;  // the next registrations
  Duration slow_memory_{};           // … of which one takes so long
  Duration registering_{};           // what those since the last look have taken
  Duration slow_out_{}, slow_in_{};
  TimePoint slow_until_{};
  std::uint32_t room_ = 0, place_ = 0;
  std::vector<std::function<void()>> held_;  // what arrived while stopped
  std::map<std::uint64_t, Endpoint> endpoints_;
  std::map<std::uint64_t, Region> regions_;
  std::vector<Queued> pending_, handed_out_;
  std::vector<Event> events_;
};

}  // namespace rejoin::transport::sim
