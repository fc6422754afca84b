#include <algorithm>
#include <optional>
#include <utility>

#include "base/digest.h"
#include "base/fail.h"
#include "base/longest_time.h"
#include "base/no_cancel.h"
#include "checkpoint.pb.h"
#include "rejoin/checkpoint_limits.h"
#include "rejoin/checkpoint_transfer.h"
#include "rejoin/prepare_process.h"
#include "rejoin/secret_address.h"
#include "transport/factory.h"
#include "transport/idle.h"

namespace rejoin {

namespace {

using transport::EndpointId, transport::Engine, transport::Event, transport::EventKind, transport::RegionId;

constexpr std::size_t kReadsUnderWay = 8;
constexpr Duration kGoodbye = std::chrono::seconds(1);

std::uint64_t slices_of(std::uint64_t bytes, std::uint64_t slice) { return bytes / slice + (bytes % slice != 0); }

class Fetch final : public CheckpointFetch {
 public:
  static Result<std::unique_ptr<CheckpointFetch>> open(const std::string& transport, const std::string& address,
                                                       std::uint64_t step, Duration limit,
                                                       std::function<bool()> cancelled) {
    prepare_process();
    auto server = SecretAddress::parse(kCheckpointScheme, kNoCheckpointServer, address);
    if (!server) return tl::unexpected(server.error());
    if (const auto own = SecretAddress::family_of(transport); own != server->family)
      return fail(ErrorCode::mismatch,
                  "the checkpoint server's transport is {}, and {} was asked for: both take the same", server->family,
                  own);
    auto engine = transport::make_engine(transport);
    if (!engine) return tl::unexpected(engine.error());
    std::unique_ptr<Fetch> fetch(new Fetch(std::move(*engine), server->address, step, std::move(cancelled)));
    fetch->deadline_ = in(limit);
    if (auto opened = fetch->get_contents(server->secret); !opened) return tl::unexpected(opened.error());
    return fetch;
  }

  ~Fetch() override {
    const NoCancel no_cancel;
    engine_.reset();
  }

  const std::string& description() const override { return contents_.description(); }
  const std::vector<std::uint64_t>& sizes() const override { return sizes_; }

  Result<> into(const std::vector<std::span<std::byte>>& buffers, Duration limit) override {
    if (buffers.size() != sizes_.size())
      return fail(ErrorCode::invalid_argument, "the checkpoint has {} buffers, and {} were given", sizes_.size(),
                  buffers.size());
    deadline_ = in(limit);
    for (std::size_t i = 0; i < buffers.size(); ++i)
      if (const auto& theirs = contents_.buffers(static_cast<int>(i)); buffers[i].size() != theirs.length())
        return fail(ErrorCode::invalid_argument, "buffer {} of the checkpoint has {} bytes, and room for {} was given",
                    i, theirs.length(), buffers[i].size());
    if (std::exchange(over_, true)) return fail(ErrorCode::unavailable, "this fetch is over: open another");
    const auto forget = [this] {
      for (const auto region : ours_) engine_->deregister(region);
      ours_.clear();
    };
    Result<> read;
    try {
      read = read_into(buffers);
    } catch (...) {  // out of `cancelled`
      forget();
      throw;
    }
    forget();
    if (read) say_goodbye();
    return read;
  }

 private:
  struct Slice {
    transport::LocalRange local;
    transport::RemoteRange remote;
    std::span<std::byte> bytes;
    std::uint64_t digest = 0;
  };

  Result<> read_into(const std::vector<std::span<std::byte>>& buffers) {
    std::vector<Slice> slices;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto& theirs = contents_.buffers(static_cast<int>(i));
      if (buffers[i].empty()) continue;
      auto region = engine_->register_region(buffers[i], transport::MemoryKind::host, transport::Access::local);
      if (!region) return tl::unexpected(region.error());
      ours_.push_back(*region);
      int number = 0;
      for (std::uint64_t at = 0; at < theirs.length(); at += contents_.slice_bytes(), ++number)
        slices.push_back({.local = {*region, at},
                          .remote = {{theirs.key(), theirs.length()}, at},
                          .bytes = buffers[i].subspan(at, std::min(contents_.slice_bytes(), theirs.length() - at)),
                          .digest = theirs.digests(number)});
    }
    return read_all(slices, "a buffer");
  }

  // The server answers by closing the connection. Whatever becomes of it, all bytes are here.
  void say_goodbye() {
    proto::CheckpointRequest done;
    done.set_done(true);
    deadline_ = std::min(deadline_, clock_.now() + kGoodbye);
    cancelled_ = nullptr;
    if (engine_->send(endpoint_, as_bytes(done.SerializeAsString())))
      (void)wait([] { return false; }, [](const Event&) {}, "the server's goodbye");
  }

  Fetch(std::unique_ptr<Engine> engine, std::string server, std::uint64_t step, std::function<bool()> cancelled)
      : engine_(std::move(engine)), server_(std::move(server)), step_(step), cancelled_(std::move(cancelled)) {}

  Result<> get_contents(const CheckpointSecret& secret) {
    const CheckpointSecret hello = proves(secret) ? checkpoint_hello(secret) : secret;
    auto endpoint = engine_->connect({server_, transport::Secret::of(secret)}, bytes_of(hello));
    if (!endpoint) return tl::unexpected(endpoint.error());
    endpoint_ = *endpoint;
    bool connected = false;
    const auto connecting = [&](const Event& event) { connected = connected || event.kind == EventKind::connected; };
    if (auto waited = wait([&] { return connected; }, connecting, "a connection"); !waited) return waited;
    proto::CheckpointRequest request;
    request.set_step(step_);
    if (auto sent = engine_->send(endpoint_, as_bytes(request.SerializeAsString())); !sent) return sent;
    std::optional<proto::CheckpointOffer> offer;
    bool corrupt = false;
    const auto offered = [&](const Event& event) {
      if (event.kind != EventKind::message) return;
      corrupt = !offer.emplace().ParseFromArray(event.message.data(), static_cast<int>(event.message.size()));
    };
    if (auto waited = wait([&] { return offer.has_value(); }, offered, fmt::format("step {} to be published", step_));
        !waited)
      return waited;
    if (!corrupt && !offer->refusal().empty()) return fail(ErrorCode::refused, "{}: {}", server_, offer->refusal());
    if (corrupt || offer->step() != step_ || offer->length() > kMostContents) return bad("an offer");

    std::string serialised(offer->length(), '\0');
    const auto memory = std::as_writable_bytes(std::span(serialised));
    auto region = engine_->register_region(memory, transport::MemoryKind::host, transport::Access::local);
    if (!region) return tl::unexpected(region.error());
    std::vector<Slice> one{{.local = {*region, 0},
                            .remote = {{offer->key(), offer->length()}, 0},
                            .bytes = memory,
                            .digest = offer->digest()}};
    auto read = read_all(one, "the list of buffers");
    engine_->deregister(*region);
    if (!read) return read;
    const Mac proof = proof_of_contents(secret, step_, memory);
    if (proves(secret) && !equal_in_constant_time(as_bytes(offer->proof()), proof)) return bad("the list of buffers");
    if (!contents_.ParseFromString(serialised) || contents_.slice_bytes() == 0) return bad("a list of buffers");
    for (const auto& buffer : contents_.buffers()) {
      if (slices_of(buffer.length(), contents_.slice_bytes()) != static_cast<std::uint64_t>(buffer.digests_size()))
        return bad("a list of digests");
      sizes_.push_back(buffer.length());
    }
    return {};
  }

  // A digest is compared while later slices are under way.
  Result<> read_all(const std::vector<Slice>& slices, std::string_view what) {
    std::size_t posted = 0, done = 0;
    std::optional<Error> error;
    const auto post = [&] {
      while (!error && posted < slices.size() && posted - done < kReadsUnderWay) {
        const auto& slice = slices[posted];
        const transport::Read read{
            .context = posted, .local = slice.local, .remote = slice.remote, .length = slice.bytes.size()};
        if (auto result = engine_->read(endpoint_, {&read, 1}); !result) {
          error = result.error();
          return;
        }
        ++posted;
      }
    };
    post();
    const auto completed = [&](const Event& event) {
      if (event.kind != EventKind::completed) return;
      ++done;
      if (error) return;
      if (event.error)
        error =
            Error{ErrorCode::unavailable, fmt::format("{} has withdrawn step {} while it was fetched, or has gone: {}",
                                                      server_, step_, event.error->message)};
      else if (digest(slices[event.value].bytes) != slices[event.value].digest) error = bad(what).value();
      post();
    };
    try {
      if (auto waited = wait([&] { return error || done == slices.size(); }, completed, what); !waited)
        error = waited.error();
    } catch (...) {  // out of `cancelled`
      engine_->close(endpoint_);
      throw;
    }
    if (!error) return {};
    engine_->close(endpoint_);  // the fence: nothing lands in the caller's memory any more
    return tl::unexpected(*error);
  }

  // Hands events to `on_event` until `ready`.
  Result<> wait(const std::function<bool()>& ready, const std::function<void(const Event&)>& on_event,
                const std::string_view what) {
    transport::Idle idle(*engine_);
    TimePoint look_around = clock_.now() + kLookAround;
    while (!ready()) {
      const auto events = engine_->poll();
      std::optional<Error> closed;
      for (const auto& event : events) {
        if (event.kind == EventKind::closed)
          closed = Error{ErrorCode::unavailable,
                         fmt::format("the checkpoint server at {} has gone, or refuses this address: {}", server_,
                                     event.error ? event.error->message : "the connection was closed")};
        on_event(event);
      }
      if (ready()) return {};
      if (closed) return tl::unexpected(*closed);
      const auto now = clock_.now();
      if (now >= deadline_)
        return fail(ErrorCode::timeout, "timed out waiting for {} of the checkpoint server at {}", what, server_);
      if (now >= look_around) {
        if (cancelled_ && cancelled_()) return fail(ErrorCode::cancelled, "interrupted while waiting for {}", what);
        look_around = now + kLookAround;
      }
      if (events.empty()) idle.wait(true, std::min(deadline_, look_around) - now);
      else idle.reset();
    }
    return {};
  }

  tl::unexpected<Error> bad(std::string_view what) const {
    return fail(
        ErrorCode::corrupt,
        "{} of step {} from {} is not what it should be: its memory was changed before it was withdrawn, or was "
        "damaged on the way",
        what, step_, server_);
  }

  std::unique_ptr<Engine> engine_;
  const std::string server_;
  const std::uint64_t step_;
  std::function<bool()> cancelled_;
  const SteadyClock clock_;
  TimePoint deadline_{};
  EndpointId endpoint_;
  bool over_ = false;
  proto::CheckpointContents contents_;
  std::vector<std::uint64_t> sizes_;
  std::vector<RegionId> ours_;  // while into() runs
};

}  // namespace

Result<std::unique_ptr<CheckpointFetch>> CheckpointFetch::open(const std::string& transport, const std::string& address,
                                                               std::uint64_t step, Duration limit,
                                                               std::function<bool()> cancelled) {
  return Fetch::open(transport, address, step, limit, std::move(cancelled));
}

}  // namespace rejoin
