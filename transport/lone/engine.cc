#include <unordered_map>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "base/refusals.h"
#include "transport/lone/factory.h"
#include "transport/striped/wire.h"

namespace rejoin::transport::lone {

namespace {

class LoneEngine final : public Engine {
 public:
  explicit LoneEngine(std::unique_ptr<Engine> below) : below_(std::move(below)) {}

  Result<Address> listen(const Address& where) override { return below_->listen(where); }
  void set_secrets(const Secrets& secrets) override { below_->set_secrets(secrets); }
  void set_silence(Duration silence) override { below_->set_silence(silence); }
  void set_polled_on() override { below_->set_polled_on(); }
  Result<> usable() override { return below_->usable(); }
  // A peer of several rails is called as one of them would, so that it says so, too.
  Result<EndpointId> connect(const Address& peer, BytesView hello) override {
    const auto rails = split(peer.text, '|');
    if (rails.size() == 1) return below_->connect(peer, hello);
    const striped::wire::Greeting greeting{.rails = 1};
    auto id = below_->connect({rails[0], peer.secret}, bytes_of(greeting));
    if (id) other_number_[id->value] = striped::wire::other_number(rails.size(), 1);
    return id;
  }

  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override {
    return below_->register_region(memory, kind, access);
  }
  Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access access) override {
    return below_->register_dma_buf(buffer, access);
  }
  void deregister(RegionId region) override { below_->deregister(region); }
  RemoteRegion remote(RegionId region) const override { return below_->remote(region); }
  bool staged(RegionId region) const override { return below_->staged(region); }
  std::uint64_t refused() const override { return below_->refused(); }

  Result<> send(EndpointId endpoint, BytesView message) override { return below_->send(endpoint, message); }
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override {
    return below_->write(endpoint, writes);
  }
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override { return below_->read(endpoint, reads); }
  std::optional<ViewableRegion> viewable(RegionId region) const override { return below_->viewable(region); }
  Result<BytesView> view(EndpointId endpoint, const ViewableRegion& region, std::uint64_t offset,
                         std::span<std::byte> room) override {
    return below_->view(endpoint, region, offset, room);
  }

  std::span<const Event> poll() override {
    const auto events = below_->poll();
    bool all = true;
    for (const auto& event : events) all &= other_number_.empty() && event.kind != EventKind::accepted;
    if (all) return events;
    passed_.clear();
    for (const auto& event : events)
      if (auto passed = pass(event)) passed_.push_back(std::move(*passed));
    return passed_;
  }
  bool arm() override { return below_->arm(); }
  int event_fd() const override { return below_->event_fd(); }
  void close(EndpointId endpoint) override {
    other_number_.erase(endpoint.value);
    below_->close(endpoint);
  }
  std::vector<Rail> rails() const override { return below_->rails(); }
  std::optional<Duration> round_trip(EndpointId endpoint) const override { return below_->round_trip(endpoint); }
  std::optional<std::uint64_t> acknowledged(EndpointId endpoint) const override {
    return below_->acknowledged(endpoint);
  }

 private:
  std::optional<Event> pass(const Event& event) {
    if (const auto peer = other_number_.find(event.endpoint.value); peer != other_number_.end()) {
      if (event.kind != EventKind::connected && event.kind != EventKind::closed) return std::nullopt;
      Error why{ErrorCode::invalid_argument, std::exchange(peer->second, {})};
      if (why.message.empty()) return std::nullopt;  // its end was told before
      return Event{.kind = EventKind::closed, .endpoint = event.endpoint, .message = {}, .error = std::move(why)};
    }
    striped::wire::Greeting greeting;
    BytesView hello = event.message;
    if (event.kind != EventKind::accepted || !take(hello, greeting) || greeting.magic != striped::wire::kMagic)
      return event;
    refusals::count(refusals::Why::protocol);
    logger().warn("a connection was refused: {}", striped::wire::other_number(greeting.rails, 1));
    below_->close(event.endpoint);
    return std::nullopt;
  }

  std::unique_ptr<Engine> below_;
  // Of peers with several rails that were called and not closed: why they can't be connected, until that is told.
  std::unordered_map<std::uint64_t, std::string> other_number_;
  std::vector<Event> passed_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<Engine> below) {
  return std::make_unique<LoneEngine>(std::move(below));
}

}  // namespace rejoin::transport::lone
