#include "bench/perf/link.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>

#include "base/fail.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/staged/factory.h"
#include "transport/tcp/factory.h"

namespace rejoin::bench::perf {

using transport::Event;
using transport::EventKind;

namespace {

// Settings that both sides must have alike; the first message each way.
struct Agreement {
  std::uint64_t magic = 0x31667265'706e4a52;
  std::uint64_t test = 0, size = 0, all_sizes = 0, iterations = 0, duration = 0, bidirectional = 0;
  transport::RemoteRegion region;
};

constexpr std::string_view kMeet = "meet";

// What a test's other side does with this side's memory.
transport::Access access_for(Test test) {
  switch (test) {
    case Test::write_bw:
    case Test::write_lat: return transport::Access::remote_write;
    case Test::read_bw: return transport::Access::remote_read;
    case Test::send_lat: break;
  }
  return transport::Access::local;
}

}  // namespace

Result<std::unique_ptr<Link>> Link::open(const Options& options) {
  std::unique_ptr<Link> link(new Link());
  link->events_ = options.events;
  auto engine = transport::make_engine(options.engine());
  if (!engine) return tl::unexpected(engine.error());
  link->engine_ = std::move(*engine);
  link->device_ = device::make_host();
  if (options.cuda) {
    auto gpu = device::open_cuda({.ordinal = *options.cuda});
    if (!gpu) return fail(gpu.error().code, "--use_cuda {}: {}", *options.cuda, gpu.error().message);
    link->device_ = std::move(*gpu);
    auto staged = transport::staged::make_engine(std::move(link->engine_), link->device_, {});
    if (!staged) return tl::unexpected(staged.error());
    link->engine_ = std::move(*staged);
  }
  const auto sizes = options.sizes();
  auto memory =
      link->device_->allocate(round_up(2 * round_up(*std::max_element(sizes.begin(), sizes.end()), 4096), 2 * MiB));
  if (!memory) return tl::unexpected(memory.error());
  link->memory_ = std::move(*memory);
  auto region = link->engine_->register_region(link->memory(), link->device_->kind(), access_for(options.test));
  if (!region) return tl::unexpected(region.error());
  link->region_ = *region;
  if (auto connected = link->connect(options); !connected) return tl::unexpected(connected.error());
  Agreement ours{.test = static_cast<std::uint64_t>(options.test),
                 .size = options.size,
                 .all_sizes = options.all_sizes,
                 .iterations = options.iterations,
                 .duration = static_cast<std::uint64_t>(options.duration_s),
                 .bidirectional = options.bidirectional,
                 .region = link->engine_->remote(link->region_)};
  if (auto sent = link->engine_->send(link->endpoint_, bytes_of(ours)); !sent) return tl::unexpected(sent.error());
  if (auto heard = link->until([&] { return link->agreement_.has_value(); }); !heard)
    return tl::unexpected(heard.error());
  Agreement theirs;
  BytesView bytes = *link->agreement_;
  if (!take(bytes, theirs)) theirs.magic = 0;
  link->remote_ = theirs.region;
  ours.region = theirs.region = {};
  if (std::memcmp(&ours, &theirs, sizeof ours) != 0)
    return fail(ErrorCode::mismatch,
                "server and client were started with other tests, sizes or iterations; give both the same options");
  return link;
}

Result<> Link::connect(const Options& options) {
  auto control = transport::tcp::make_engine({});
  if (!control) return tl::unexpected(control.error());
  control_ = std::move(*control);
  std::string address;
  const std::string kind = options.cuda ? "cuda " : "host ";
  if (options.server()) {
    auto where = engine_->listen({"0.0.0.0:0"});
    if (!where) return tl::unexpected(where.error());
    auto listening = control_->listen({fmt::format("{}:{}", options.local_address, options.port)});
    if (!listening) return tl::unexpected(listening.error());
    fmt::print(
        "\n************************************\n* Waiting for client to connect... *\n"
        "************************************\nlistening on {}\n",
        listening->text);
    std::fflush(stdout);
    // The client's host and port 0.0.0.0 mean the address that it reached us at.
    while (endpoint_ == transport::EndpointId{}) {
      for (const auto& event : control_->poll())
        if (event.kind == EventKind::accepted) (void)control_->send(event.endpoint, as_bytes(kind + where->text));
      auto polled = poll([&](const Event& event) {
        if (event.kind == EventKind::accepted) endpoint_ = event.endpoint;
      });
      if (!polled) return polled;
    }
    return {};
  }
  auto reached = control_->connect({fmt::format("{}:{}", options.host, options.port)}, {});
  if (!reached) return tl::unexpected(reached.error());
  while (address.empty())
    for (const auto& event : control_->poll()) {
      if (event.kind == EventKind::closed)
        return fail(ErrorCode::unavailable, "no server at {}:{}: {}; start the same tool there without a host",
                    options.host, options.port, event.error->message);
      if (event.kind == EventKind::message) address = as_text(event.message);
    }
  if (!address.starts_with(kind))
    return fail(ErrorCode::mismatch, "--use_cuda: {}; give it to both or to none",
                options.cuda ? "the server was started without it" : "the server was started with it");
  address.erase(0, kind.size());
  auto endpoint = engine_->connect(transport::with_host_for_any({address}, options.host), {});
  if (!endpoint) return tl::unexpected(endpoint.error());
  endpoint_ = *endpoint;
  bool connected = false;
  return until([&] { return connected; }, [&](const Event& event) { connected |= event.kind == EventKind::connected; });
}

Result<> Link::poll(const std::function<void(const Event&)>& on_event) {
  if (ended_) return tl::unexpected(*ended_);
  const auto events = engine_->poll();
  // As perftest it spins, but for a while only: where there are fewer cores than processes, others would wait for it.
  constexpr int spins = 500;
  if (!events.empty()) idle_polls_ = 0;
  else if (++idle_polls_ > spins) ::sched_yield();
  for (const auto& event : events) {
    if (event.kind == EventKind::closed)
      ended_ = event.error.value_or(Error{ErrorCode::unavailable, "the other side is gone"});
    if (event.kind == EventKind::completed && event.error) return fail(event.error->code, "{}", event.error->message);
    if (event.kind == EventKind::message) {
      if (!agreement_) agreement_.emplace(event.message.begin(), event.message.end());
      else if (as_text(event.message) == kMeet) ++met_;
      else ++messages_;
    } else if (on_event) {
      on_event(event);
    }
  }
  return {};
}

Result<> Link::until(const std::function<bool()>& done, const std::function<void(const Event&)>& on_event) {
  while (!done()) {
    wait_for_event();
    if (auto polled = poll(on_event); !polled) return polled;
  }
  return {};
}

Result<> Link::put(std::span<std::byte> there, BytesView bytes) {
  auto stream = device_->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  if (auto copied = (*stream)->copy(there.data(), bytes.data(), bytes.size()); !copied) return copied;
  return (*stream)->synchronize();
}

Result<Bytes> Link::get(BytesView there) {
  auto stream = device_->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  Bytes bytes(there.size());
  if (auto copied = (*stream)->copy(bytes.data(), there.data(), there.size()); !copied)
    return tl::unexpected(copied.error());
  if (auto done = (*stream)->synchronize(); !done) return tl::unexpected(done.error());
  return bytes;
}

std::string Link::memory_name() const {
  if (device_->kind() == transport::MemoryKind::host) return device_->name();
  const bool staged = engine_->staged(region_);
  return device_->name() + (staged ? ", staged through host memory" : ", reached directly");
}

void Link::wait_for_event() {
  if (ended_ || !events_ || !engine_->arm()) return;
  pollfd ready{.fd = engine_->event_fd(), .events = POLLIN, .revents = 0};
  (void)::poll(&ready, 1, 1000);  // what an engine does after a while it does when it is polled
}

Result<> Link::meet() {
  ++meetings_;
  if (auto sent = engine_->send(endpoint_, as_bytes(kMeet)); !sent) return sent;
  return until([&] { return met_ >= meetings_; });
}

}  // namespace rejoin::bench::perf
