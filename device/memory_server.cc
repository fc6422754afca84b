#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include "base/fail.h"
#include "base/log.h"
#include "base/priority.h"
#include "base/start_thread.h"
#include "base/unix_socket.h"
#include "device/remote.h"
#include "device/remote_wire.h"

namespace rejoin::device {

using remote::Kind, remote::Range, remote::Reply, remote::Request;

namespace {
// Lines that are ready: while the thread stands in the driver, so many daemons may follow one another.
constexpr std::size_t kPrepared = 2;
}  // namespace

// A process that is served, or will be.
struct MemoryServer::Served {
  Fd socket;
  Mapping shared;
  Memory pinned;               // that it is; goes before the mapping
  std::optional<Line> theirs;  // until it is given away
  std::byte* at(std::uint64_t offset) const { return shared.data() + offset; }
  remote::Header& header() const { return *reinterpret_cast<remote::Header*>(shared.data()); }
};

Result<std::unique_ptr<MemoryServer>> MemoryServer::make(std::shared_ptr<Device> device,
                                                         std::vector<std::span<std::byte>> memory) {
  std::unique_ptr<MemoryServer> server(new MemoryServer());
  server->device_ = std::move(device);
  server->memory_ = std::move(memory);
  auto copies = server->device_->make_stream(Priority::low);
  if (!copies) return tl::unexpected(copies.error());
  server->copies_ = std::move(*copies);
  auto access = server->device_->make_access(Priority::low);
  if (!access) return tl::unexpected(access.error());
  server->access_ = std::move(*access);
  while (server->next_.size() < kPrepared) {
    auto next = server->prepare();
    if (!next) return tl::unexpected(next.error());
    server->next_.push_back(std::move(*next));
  }
  auto wake = make_eventfd();
  if (!wake) return tl::unexpected(wake.error());
  server->wake_ = std::move(*wake);
  if (auto started = start_thread(server->thread_, [raw = server.get()] { raw->run(); }); !started)
    return tl::unexpected(started.error());
  return server;
}

MemoryServer::~MemoryServer() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (!thread_.joinable()) return;
  signal_eventfd(wake_);
  thread_.join();
}

std::optional<Line> MemoryServer::next() {
  const std::lock_guard lock(mutex_);
  signal_eventfd(wake_);
  if (next_.empty()) return std::nullopt;
  std::optional<Line> line = std::exchange(next_.back()->theirs, std::nullopt);
  taken_.push_back(std::move(next_.back()));
  next_.pop_back();
  return line;
}

bool MemoryServer::end_served(Duration longest) {
  std::unique_lock lock(mutex_);
  const auto number = ++ends_wanted_;
  signal_eventfd(wake_);
  return ended_one_.wait_for(lock, longest, [&] { return ends_done_ >= number; });
}

std::size_t MemoryServer::release_ended() {
  std::vector<std::unique_ptr<Served>> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = std::exchange(ended_, {});
  }
  return ended.size();
}

Result<std::unique_ptr<MemoryServer::Served>> MemoryServer::prepare() const {
  auto served = std::make_unique<Served>();
  auto memory = make_sealed_memfd("rejoin-served", remote::kMemoryBytes);
  if (!memory) return tl::unexpected(memory.error());
  auto shared = Mapping::of(*memory, remote::kMemoryBytes);
  if (!shared) return tl::unexpected(shared.error());
  served->shared = std::move(*shared);
  auto pinned = device_->pin(served->shared.span());
  if (!pinned) return tl::unexpected(pinned.error());
  served->pinned = std::move(*pinned);
  new (served->shared.data())
      remote::Header{.needs_flush = device_->remote_writes() == Device::RemoteWrites::flushed ? 1u : 0u};
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    return fail_errno("sockets for a process that is served GPU memory");
  served->socket = Fd(ends[0]);
  served->theirs = Line{.socket = Fd(ends[1]), .memory = std::move(*memory)};
  return served;
}

void MemoryServer::run() {
  (void)::pthread_setname_np(::pthread_self(), "rejoin-memory");  // for people, and for the driver of software
  let_training_go_first();
  std::unique_ptr<Served> served;
  const auto end = [&](std::unique_ptr<Served> gone) {
    if (!gone) return;
    (void)copies_->synchronize();  // before its memory goes; errors have been logged
    gone->socket.reset();
    const std::lock_guard lock(mutex_);
    ended_.push_back(std::move(gone));
  };
  for (bool logged = false;;) {
    bool wanted = false;
    std::uint64_t ends = 0;
    std::vector<std::unique_ptr<Served>> taken;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) break;
      ends = ends_wanted_ - ends_done_;
      taken = std::exchange(taken_, {});
      wanted = next_.size() < kPrepared;
    }
    if (!taken.empty()) end(std::exchange(served, std::move(taken.back())));
    for (auto& before : taken) end(std::move(before));  // the last has gone from it
    if (ends > 0) {
      end(std::move(served));
      const std::lock_guard lock(mutex_);
      ends_done_ += ends;
      ended_one_.notify_all();
    }
    if (wanted) {
      auto made = prepare();
      if (!made && !std::exchange(logged, true))
        logger().error("no other daemon can be served this GPU's memory: {}", made.error().message);
      const std::lock_guard lock(mutex_);
      if (made) next_.push_back(std::move(*made));
      wanted = made && next_.size() < kPrepared;
    }
    Result<> goes_on;
    while (served && goes_on && !changed()) {
      auto message = receive_with_fds(served->socket, sizeof(Request) + remote::kMostRanges * sizeof(Range));
      if (!message) {
        goes_on = tl::unexpected(message.error());  // it has ended, or has another line
      } else if (!*message) {
        break;
      } else if (goes_on = answer(*served, (*message)->bytes); !goes_on) {
        logger().error("a process that is served GPU memory: {}", goes_on.error().message);
      }
    }
    if (!goes_on) end(std::move(served));
    if (wanted || changed()) continue;
    pollfd waits[] = {{wake_.get(), POLLIN, 0}, {served ? served->socket.get() : -1, POLLIN, 0}};
    (void)::poll(waits, served ? 2 : 1, -1);
    drain_eventfd(wake_);
  }
  end(std::move(served));
}

// Somebody else is to be served, or nobody any more.
bool MemoryServer::changed() {
  const std::lock_guard lock(mutex_);
  return stop_ || !taken_.empty() || ends_wanted_ > ends_done_;
}

bool MemoryServer::is_served(std::uint64_t address, std::uint64_t size) const {
  for (const auto& part : memory_) {
    const auto begin = reinterpret_cast<std::uint64_t>(part.data());
    if (address >= begin && in_range(address - begin, size, part.size())) return true;
  }
  return false;
}

Result<> MemoryServer::answer(Served& served, BytesView message) {
  Request request;
  std::vector<Range> ranges;
  const auto bad = [](const char* what) { return fail(ErrorCode::corrupt, "it sent a request {}", what); };
  Result<> done;
  if (!take(message, request) || request.count > remote::kMostRanges || message.size() != request.count * sizeof(Range))
    return bad("that can't be read");
  ranges.resize(request.count);
  for (auto& range : ranges) {
    (void)take(message, range);  // of that size, as has been seen
    if (!is_served(range.address, range.size)) return bad("for memory that is not served");
  }
  Reply reply{.number = request.number};
  Bytes rest;
  switch (request.kind) {
    case Kind::to_host:
    case Kind::to_device: {
      const bool out = request.kind == Kind::to_host;
      if (ranges.size() != 1 || ranges[0].offset < remote::kHeaderBytes ||
          !in_range(ranges[0].offset, ranges[0].size, served.shared.size()))
        return bad("for a copy outside of the memory for it");
      auto* device = reinterpret_cast<std::byte*>(ranges[0].address);
      std::byte* host = served.at(ranges[0].offset);
      done = copies_->copy(out ? host : device, out ? device : host, ranges[0].size).and_then([&] {
        return copies_->write(&served.header().done, request.number);
      });
      if (done) return {};
      break;
    }
    case Kind::digest: {
      std::vector<BytesView> of;
      for (const auto& range : ranges) of.emplace_back(reinterpret_cast<const std::byte*>(range.address), range.size);
      const auto digests = access_->digests(of);
      if (digests) {
        reply.count = static_cast<std::uint32_t>(digests->size());
        for (const auto digest : *digests) put(rest, digest);
      } else {
        done = tl::unexpected(digests.error());
      }
      break;
    }
    case Kind::flush: done = device_->flush_remote_writes(); break;
    default: return bad("of no kind");
  }
  if (!done) {
    reply.failed = 1;
    rest.assign(as_bytes(done.error().message).begin(), as_bytes(done.error().message).end());
  }
  // It waits for this one before it asks for the next, so there is room.
  auto sent = send_with_fds(served.socket, joined(reply, rest), {});
  return done ? sent : done;
}

}  // namespace rejoin::device
