#include <unordered_map>
#include <utility>

#include "transport/endpoints.h"
#include "transport/threaded/factory.h"
#include "transport/threaded/worker.h"

namespace rejoin::transport::threaded {

namespace {

// The owner's part: it knows of endpoints and regions what it takes to refuse what can't be posted.
class ThreadedEngine final : public Engine {
 public:
  explicit ThreadedEngine(std::unique_ptr<Worker> worker) : worker_(std::move(worker)) {}

  Result<Address> listen(const Address& where) override {
    return worker_->answer_of([&](Engine& below) { return below.listen(where); });
  }
  void set_secrets(const Secrets& secrets) override {
    worker_->call([&](Engine& below) { below.set_secrets(secrets); });
  }
  void set_silence(Duration silence) override {
    worker_->call([&](Engine& below) { below.set_silence(silence); });
  }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override {
    auto id = worker_->answer_of([&](Engine& below) { return below.connect(peer, hello); });
    if (id) add(*id, Stage::connecting);
    return id;
  }

  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override {
    return keep(memory, access, [&](Engine& below) { return below.register_region(memory, kind, access); });
  }
  Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access access) override {
    return keep(buffer.memory, access, [&](Engine& below) { return below.register_dma_buf(buffer, access); });
  }
  void deregister(RegionId region) override {
    const auto below = below_.extract(region.value);
    if (below.empty()) return;
    regions_.remove(region);
    worker_->call([&](Engine& engine) { engine.deregister(below.mapped()); });
  }
  RemoteRegion remote(RegionId region) const override { return regions_.remote(region); }
  std::uint64_t refused() const override { return worker_->refused(); }

  Result<> send(EndpointId id, BytesView message) override {
    if (auto endpoint = find_open_endpoint(endpoints_, id); !endpoint) return tl::unexpected(endpoint.error());
    if (auto checked = check_message(message); !checked) return checked;
    worker_->post({id, Bytes(message.begin(), message.end())});
    if ((unanswered_ += message.size()) > kMostUnanswered) {  // the engine below sees to it that no more wait there
      worker_->call([](Engine&) {});
      unanswered_ = 0;
    }
    return {};
  }
  Result<> write(EndpointId id, std::span<const Write> writes) override { return post(id, writes); }
  Result<> read(EndpointId id, std::span<const Read> reads) override { return post(id, reads); }

  std::span<const Event> poll() override {
    taken_ = worker_->take();
    events_.clear();
    for (auto& queue : taken_)
      for (const auto& event : queue.take())
        if (concerns(event)) events_.push_back(event);
    return events_;
  }
  bool arm() override { return worker_->arm(); }
  int event_fd() const override { return worker_->event_fd(); }

  void close(EndpointId id) override {
    if (endpoints_.erase(id.value) > 0) worker_->call([&](Engine& below) { below.close(id); });
  }
  std::vector<Rail> rails() const override {
    return worker_->answer_of([](Engine& below) { return below.rails(); });
  }
  std::optional<Duration> round_trip(EndpointId id) const override {
    return worker_->answer_of([&](Engine& below) { return below.round_trip(id); });
  }
  std::optional<std::uint64_t> acknowledged(EndpointId id) const override {
    return worker_->answer_of([&](Engine& below) { return below.acknowledged(id); });
  }

 private:
  static constexpr std::size_t kMostUnanswered = 1 * MiB;  // of messages that the thread has not taken

  enum class Stage { connecting, open, failed };
  struct Endpoint {
    Stage stage = Stage::connecting;
    std::string failure;
  };

  void add(EndpointId id, Stage stage) { endpoints_[id.value] = std::make_unique<Endpoint>(Endpoint{stage, {}}); }

  template <typename Register>
  Result<RegionId> keep(std::span<std::byte> memory, Access access, Register register_below) {
    RemoteRegion remote;
    const auto below = worker_->answer_of([&](Engine& engine) {
      Result<RegionId> region = register_below(engine);
      if (region) remote = engine.remote(*region);
      return region;
    });
    if (!below) return below;
    const RegionId region = regions_.add(memory, access, remote.key);
    below_[region.value] = *below;
    return region;
  }

  template <typename Operation>
  Result<> post(EndpointId id, std::span<const Operation> operations) {
    if (auto found = find_for_posting(endpoints_, regions_, id, operations); !found)
      return tl::unexpected(found.error());
    std::vector<Operation> posted(operations.begin(), operations.end());
    for (auto& one : posted) one.local.region = below_.at(one.local.region.value);
    worker_->post({id, std::move(posted)});
    return {};
  }

  // Of what has happened before the owner closed an endpoint it hears only how operations have ended.
  bool concerns(const Event& event) {
    if (event.kind == EventKind::completed) return true;
    if (event.kind == EventKind::accepted) add(event.endpoint, Stage::open);
    Endpoint* endpoint = find_endpoint(endpoints_, event.endpoint);
    if (endpoint == nullptr) return false;
    if (event.kind == EventKind::connected) endpoint->stage = Stage::open;
    if (event.kind == EventKind::closed) {
      endpoint->stage = Stage::failed;
      if (event.error) endpoint->failure = event.error->message;
    }
    return true;
  }

  Unguessable unguessable_;
  Regions regions_{unguessable_};                      // with the keys of those below
  std::unordered_map<std::uint64_t, RegionId> below_;  // by ours
  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  std::vector<EventQueue> taken_;  // holds the messages of …
  std::vector<Event> events_;
  std::size_t unanswered_ = 0;  // bytes
  const std::unique_ptr<Worker> worker_;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Engine> below) {
  auto worker = Worker::make(std::move(below));
  if (!worker) return tl::unexpected(worker.error());
  return std::make_unique<ThreadedEngine>(std::move(*worker));
}

}  // namespace rejoin::transport::threaded
