#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/digest.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/longest_time.h"
#include "base/no_cancel.h"
#include "base/no_signals.h"
#include "base/start_thread.h"
#include "checkpoint.pb.h"
#include "rejoin/checkpoint_limits.h"
#include "rejoin/checkpoint_transfer.h"
#include "rejoin/prepare_process.h"
#include "rejoin/secret_address.h"
#include "transport/idle.h"

namespace rejoin {

namespace {

using transport::EndpointId, transport::Engine, transport::Event, transport::EventKind, transport::RegionId;

constexpr std::uint64_t kSlice = 4 * MiB;  // read and digested at a time
constexpr std::size_t kMostConnections = 1024;
constexpr std::string_view kParentsServer =
    "this checkpoint server is of the process that this one was forked from, whose thread serves: make another in this "
    "process";

std::span<std::byte> unconst(std::span<const std::byte> bytes) {  // nothing is written there
  return {const_cast<std::byte*>(bytes.data()), bytes.size()};
}

struct Published {
  std::uint64_t step = 0;
  std::string contents;  // serialised, where those who fetch read it
  std::uint64_t digest = 0;
  Mac proof{};
  RegionId region;
  std::vector<RegionId> buffers;
};

class Server final : public CheckpointServer {
 public:
  static Result<std::unique_ptr<CheckpointServer>> open(const CheckpointServerConfig& config) {
    prepare_process();
    const NoSignals no_signals;  // also of the transport's threads
    auto listener = SecretListener::open(config);
    if (!listener) return tl::unexpected(listener.error());
    listener->own.secret[1] = (listener->own.secret[1] & ~kProvesMask) | kProves;
    listener->engine->set_secrets({transport::Secret::of(listener->own.secret)});
    auto wake = make_eventfd();
    if (!wake) return tl::unexpected(wake.error());
    std::unique_ptr<Server> made(new Server(listener->own, std::move(listener->engine), std::move(*wake)));
    if (auto started = start_thread(made->thread_, [server = made.get()] { server->run(); }); !started)
      return tl::unexpected(started.error());
    return made;
  }

  ~Server() override {
    if (!here()) {
      leave_to_parent(thread_);
      (void)engine_.release();  // it stands as it stood
      return;
    }
    const NoCancel no_cancel;
    stop_ = true;
    signal_eventfd(wake_);
    if (thread_.joinable()) thread_.join();
    engine_.reset();
  }

  const std::string& address() const override { return address_; }

  Result<> publish(std::uint64_t step, std::string description,
                   const std::vector<std::span<const std::byte>>& buffers) override {
    if (!here()) return fail(ErrorCode::unavailable, "{}", kParentsServer);
    proto::CheckpointContents contents;
    contents.set_description(std::move(description));
    contents.set_slice_bytes(kSlice);
    for (std::size_t i = 0; i < buffers.size(); ++i)
      if (buffers[i].data() == nullptr && !buffers[i].empty())
        return fail(ErrorCode::invalid_argument, "buffer {} of {} has {} bytes at the address 0: give it memory", i,
                    buffers.size(), buffers[i].size());
    for (const auto& buffer : buffers) {
      auto& described = *contents.add_buffers();
      described.set_length(buffer.size());
      for (std::uint64_t at = 0; at < buffer.size(); at += kSlice)
        described.add_digests(digest(buffer.subspan(at, std::min<std::uint64_t>(kSlice, buffer.size() - at))));
    }
    return in_thread([&](bool) { return std::optional(publish_here(step, contents, buffers)); });
  }

  std::size_t withdraw(Duration patience, const std::function<bool()>& cancelled) override {
    if (!here()) return 0;
    const TimePoint deadline = in(patience);
    std::size_t cut_off = 0;
    const auto look = [&](bool given_up) -> std::optional<Result<>> {
      if (!reading_.empty() && clock_.now() < deadline && !given_up) {
        look_again_ = std::min(look_again_, deadline);
        return std::nullopt;
      }
      cut_off = reading_.size();
      withdraw_here();
      return Result<>();
    };
    (void)in_thread(look, cancelled);
    return cut_off;
  }

 private:
  Server(const SecretAddress& address, std::unique_ptr<Engine> engine, Fd wake)
      : address_(address.text(kCheckpointScheme)),
        secret_(address.secret),
        hello_(checkpoint_hello(address.secret)),
        engine_(std::move(engine)),
        wake_(std::move(wake)) {}

  // Not in a child of fork(), where the thread that it would wait for is not ("Children of fork()").
  bool here() const { return ::getpid() == process_; }

  // Runs it in the server's thread, which owns the engine, again after each event until it gives a result, which it is
  // to do when it is given up; waits for that. `cancelled` is asked from time to time, and gives it up.
  Result<> in_thread(const std::function<std::optional<Result<>>(bool given_up)>& call,
                     const std::function<bool()>& cancelled = {}) {
    std::unique_lock lock(mutex_);
    std::atomic<bool> given_up = false;
    std::optional<Result<>> result;
    const auto over = [&] { return result.has_value(); };
    const auto give_up = [&] {
      given_up = true;
      signal_eventfd(wake_);
    };
    calls_.push_back([&] {
      std::optional<Result<>> outcome;
      try {
        outcome = call(given_up);
      } catch (const std::exception& error) {  // of memory
        outcome = abandon({ErrorCode::exhausted, error.what()});
      }
      const std::lock_guard guard(mutex_);
      result = std::move(outcome);
      if (result) done_.notify_all();
      return result.has_value();
    });
    signal_eventfd(wake_);
    try {
      while (!done_.wait_for(lock, kLookAround, over)) {
        if (!cancelled || given_up) continue;
        lock.unlock();
        if (cancelled()) give_up();
        lock.lock();
      }
    } catch (...) {  // out of `cancelled`, or the caller's thread is being cancelled: what the call uses goes with this
      if (!lock) lock.lock();
      give_up();
      done_.wait(lock, over);
      throw;
    }
    return *result;
  }

  void run() {
    transport::Idle idle(*engine_);
    const int others[] = {wake_.get()};
    std::vector<std::function<bool()>> calls;
    while (!stop_) {
      const auto events = engine_->poll();
      for (const auto& event : events) on_event(event);
      const bool called = take_calls(calls);
      look_again_ = clock_.now() + std::chrono::seconds(1);
      std::erase_if(calls, [](const auto& call) { return call(); });
      if (!events.empty() || called) idle.reset();
      else idle.wait(false, look_again_ - clock_.now(), others);
    }
    withdraw_here();
  }

  // Moves what others have asked for since then to the end of `calls`; whether that is anything.
  bool take_calls(std::vector<std::function<bool()>>& calls) {
    drain_eventfd(wake_);
    const std::lock_guard guard(mutex_);
    const bool any = !calls_.empty();
    std::move(calls_.begin(), calls_.end(), std::back_inserter(calls));
    calls_.clear();
    return any;
  }

  void on_event(const Event& event) {
    if (event.kind == EventKind::accepted) {
      CheckpointSecret theirs{};
      BytesView bytes = event.message;
      const bool knows = take(bytes, theirs) && bytes.empty() && (theirs == hello_ || theirs == secret_);
      if (knows && wanted_.size() < kMostConnections) wanted_.emplace(event.endpoint, std::nullopt);
      else engine_->close(event.endpoint);
    } else if (event.kind == EventKind::message) {
      const auto found = wanted_.find(event.endpoint);
      proto::CheckpointRequest request;
      if (found == wanted_.end()) return;
      if (!request.ParseFromArray(event.message.data(), static_cast<int>(event.message.size())) || request.done())
        return forget(event.endpoint);
      found->second = request.step();
      answer(event.endpoint, request.step());
    } else if (event.kind == EventKind::closed) {
      forget(event.endpoint);
    }
  }

  void forget(EndpointId endpoint) {
    wanted_.erase(endpoint);
    reading_.erase(endpoint);
    engine_->close(endpoint);
  }

  // An earlier step will not come any more; for a later one who fetches waits.
  void answer(EndpointId endpoint, std::uint64_t step) {
    if (!published_ || published_->step < step) return;
    proto::CheckpointOffer offer;
    offer.set_step(published_->step);
    if (published_->step == step) {
      const auto remote = engine_->remote(published_->region);
      offer.set_key(remote.key);
      offer.set_length(remote.length);
      offer.set_digest(published_->digest);
      offer.set_proof(published_->proof.data(), published_->proof.size());
      reading_.insert(endpoint);
    } else {
      offer.set_refusal(fmt::format("step {} was asked for, and step {} is published", step, published_->step));
    }
    wanted_[endpoint].reset();
    const auto bytes = offer.SerializeAsString();
    if (!engine_->send(endpoint, as_bytes(bytes))) forget(endpoint);
  }

  Result<> publish_here(std::uint64_t step, proto::CheckpointContents& contents,
                        const std::vector<std::span<const std::byte>>& buffers) {
    withdraw_here();
    published_.emplace();
    published_->step = step;
    const auto registered = [&](std::span<const std::byte> memory) -> Result<RegionId> {
      auto region =
          engine_->register_region(unconst(memory), transport::MemoryKind::host, transport::Access::remote_read);
      if (region) published_->buffers.push_back(*region);
      return region;
    };
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].empty()) continue;
      const auto region = registered(buffers[i]);
      if (!region) return abandon(region.error());
      contents.mutable_buffers(static_cast<int>(i))->set_key(engine_->remote(*region).key);
    }
    if (!contents.SerializeToString(&published_->contents) || published_->contents.size() > kMostContents)
      return abandon({ErrorCode::invalid_argument,
                      fmt::format("the description and the list of {} buffers have {} bytes, over the limit of {}",
                                  buffers.size(), contents.ByteSizeLong(), kMostContents)});
    published_->digest = digest(as_bytes(published_->contents));
    published_->proof = proof_of_contents(secret_, step, as_bytes(published_->contents));
    const auto region = registered(as_bytes(published_->contents));
    if (!region) return abandon(region.error());
    published_->region = *region;
    // A copy: who has been answered wants nothing more.
    for (const auto& [endpoint, wants] : std::map(wanted_))
      if (wants) answer(endpoint, *wants);
    return {};
  }

  Result<> abandon(Error error) {
    withdraw_here();
    return tl::unexpected(std::move(error));
  }

  void withdraw_here() {
    if (!published_) return;
    for (const auto region : published_->buffers) engine_->deregister(region);
    published_.reset();
    for (const auto endpoint : std::set(reading_)) forget(endpoint);  // they are cut off
  }

  const pid_t process_ = ::getpid();
  const std::string address_;
  const CheckpointSecret secret_, hello_;
  std::unique_ptr<Engine> engine_;                             // of the server's thread, as all up to look_again_
  std::map<EndpointId, std::optional<std::uint64_t>> wanted_;  // the step, once it is known
  std::optional<Published> published_;
  std::set<EndpointId> reading_;  // whom it has been offered to, until they have it
  TimePoint look_again_{};
  const SteadyClock clock_;
  const Fd wake_;
  std::mutex mutex_;  // guards calls_, and what in_thread() waits for
  std::condition_variable done_;
  std::vector<std::function<bool()>> calls_;  // each returns whether it is over
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<CheckpointServer>> CheckpointServer::open(const CheckpointServerConfig& config) {
  return Server::open(config);
}

}  // namespace rejoin
