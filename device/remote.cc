#include "device/remote.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "base/fail.h"
#include "base/unix_socket.h"
#include "device/pinned_access.h"
#include "device/remote_wire.h"

namespace rejoin::device {

namespace {

using remote::Kind, remote::Range, remote::Reply, remote::Request;

// The line to the server. Streams and memory keep it.
class Client {
 public:
  Client(Fd socket, Mapping shared) : socket_(std::move(socket)), shared_(std::move(shared)) {}

  Result<std::span<std::byte>> allocate(std::size_t size) {
    if (size > shared_.size() - taken_)
      return fail(ErrorCode::exhausted, "{} of pinned memory, and {} are left of what its trainer shares",
                  human_bytes(size), human_bytes(shared_.size() - taken_));
    const auto memory = shared_.span().subspan(taken_, size);
    taken_ = round_up(taken_ + size, 4096);
    return memory;
  }
  bool needs_flush() const { return header().needs_flush != 0; }

  // The owner's addresses are another process's, and may be those of anything here: so its memory gets addresses of its
  // own, which nobody can touch.
  Result<std::span<std::byte>> import(const std::byte* theirs, std::size_t size) {
    void* at = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return fail_errno("addresses for a trainer's GPU memory");
    auto* here = static_cast<std::byte*>(at);
    imported_[here] = {size, reinterpret_cast<std::uint64_t>(theirs)};
    return std::span(here, size);
  }
  ~Client() {
    for (const auto& [here, memory] : imported_) (void)::munmap(here, memory.size);  // of this process: it can't fail
  }

  // Which end of a copy is which shows in where it lies.
  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) {
    const auto here = [&](const std::byte* at) { return at >= shared_.data() && at < shared_.data() + shared_.size(); };
    if (here(to) == here(from))
      return fail(ErrorCode::invalid_argument, "a copy that is not between the GPU's memory and pinned memory");
    const std::byte *host = here(to) ? to : from, *device = here(to) ? from : to;
    const Range range{
        .address = address_of(device), .offset = static_cast<std::uint64_t>(host - shared_.data()), .size = size};
    return ask(here(to) ? Kind::to_host : Kind::to_device, {&range, 1}).map([&] { last_copy_ = last_; });
  }
  std::uint64_t last_copy() const { return last_copy_; }

  // Number of the last copy that is done.
  Result<std::uint64_t> done() {
    if (error_) return tl::unexpected(*error_);
    const auto done = std::atomic_ref(header().done).load(std::memory_order_acquire);
    if (done >= last_copy_) return last_copy_;  // whatever the other side has written there
    auto received = receive();                  // nothing but the end comes unasked
    if (!received) return tl::unexpected(received.error());
    if (*received) return lose("its trainer sent a reply to nothing");
    // A trainer may be stopped, or its GPU busy, for long: no core is spent on that.
    if (std::exchange(seen_, done) != done) looks_ = 0;
    else if (++looks_ > kLooks) {
      pollfd end{socket_.get(), POLLIN, 0};
      (void)::poll(&end, 1, 1);
    }
    return done;
  }
  Result<> finish() {
    for (;; std::this_thread::yield()) {
      const auto reached = done();
      if (!reached) return tl::unexpected(reached.error());
      if (*reached >= last_copy_) return {};
    }
  }

  Result<> flush() {
    return ask(Kind::flush, {}).and_then([&] { return reply(0); }).map([](const auto&) {});
  }

  Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> of) {
    std::vector<std::uint64_t> all;
    for (; !of.empty(); of = of.subspan(std::min<std::size_t>(of.size(), remote::kMostRanges))) {
      std::vector<Range> ranges;
      for (const auto bytes : of.first(std::min<std::size_t>(of.size(), remote::kMostRanges)))
        ranges.push_back({.address = address_of(bytes.data()), .size = bytes.size()});
      const auto some = ask(Kind::digest, ranges).and_then([&] { return reply(ranges.size()); });
      if (!some) return some;
      all.insert(all.end(), some->begin(), some->end());
    }
    return all;
  }

  void disconnect() { (void)::shutdown(socket_.get(), SHUT_RDWR); }  // wakes whoever waits for it

 private:
  // In its owner's process. Of memory that was not imported: none, which the server refuses.
  std::uint64_t address_of(const std::byte* here) const {
    auto next = imported_.upper_bound(const_cast<std::byte*>(here));
    if (next == imported_.begin()) return 0;
    const auto& [begin, memory] = *std::prev(next);
    const auto offset = static_cast<std::uint64_t>(here - begin);
    return offset <= memory.size ? memory.theirs + offset : 0;
  }

  remote::Header& header() const { return *reinterpret_cast<remote::Header*>(shared_.data()); }

  tl::unexpected<Error> lose(std::string what) {
    if (!error_) error_ = Error{ErrorCode::unavailable, std::move(what)};
    return tl::unexpected(*error_);
  }

  Result<> ask(Kind kind, std::span<const Range> ranges) {
    if (error_) return tl::unexpected(*error_);
    const Request request{.kind = kind, .count = static_cast<std::uint32_t>(ranges.size()), .number = ++last_};
    const Bytes message = joined(request, std::as_bytes(ranges));
    for (;;) {
      auto sent = send_with_fds(socket_, message, {});
      if (sent) return {};
      if (sent.error().code != ErrorCode::exhausted) return lose(gone(sent.error()));
      pollfd room{socket_.get(), POLLOUT, 0};
      (void)::poll(&room, 1, -1);
    }
  }

  Result<std::vector<std::uint64_t>> reply(std::size_t expected) {
    for (;;) {
      auto received = receive();
      if (!received) return tl::unexpected(received.error());
      if (!*received) {
        pollfd there{socket_.get(), POLLIN, 0};
        (void)::poll(&there, 1, -1);
        continue;
      }
      BytesView bytes = **received;
      Reply reply;
      if (!take(bytes, reply) || reply.number != last_ || reply.count != expected ||
          bytes.size() != expected * sizeof(std::uint64_t))
        return lose("its trainer sent a reply to something else");
      std::vector<std::uint64_t> digests(expected);
      for (auto& digest : digests) (void)take(bytes, digest);
      return digests;
    }
  }

  // The next reply, if there is one; errors are the server's, too.
  Result<std::optional<Bytes>> receive() {
    auto received = receive_with_fds(socket_, sizeof(Reply) + remote::kMostRanges * sizeof(std::uint64_t) + 4096);
    if (!received) return lose(gone(received.error()));
    if (!*received) return std::optional<Bytes>{};
    BytesView bytes = (*received)->bytes;
    if (Reply reply; take(bytes, reply) && reply.failed != 0) return lose(std::string(as_text(bytes)));
    return std::move((*received)->bytes);
  }

  static std::string gone(const Error& error) { return fmt::format("its trainer is gone: {}", error.message); }

  const Fd socket_;
  const Mapping shared_;
  struct Imported {
    std::size_t size = 0;
    std::uint64_t theirs = 0;
  };
  std::map<std::byte*, Imported> imported_;
  std::size_t taken_ = remote::kHeaderBytes;
  std::uint64_t last_ = 0, last_copy_ = 0;
  static constexpr std::uint64_t kLooks = 20'000;  // at what does not change, some milliseconds
  std::uint64_t seen_ = 0, looks_ = 0;
  std::optional<Error> error_;
};

// Copies of one line are done in order, so all its streams are one.
class RemoteStream final : public Stream {
 public:
  explicit RemoteStream(std::shared_ptr<Client> client) : client_(std::move(client)) {}
  ~RemoteStream() override { (void)client_->finish(); }  // the calls before have returned its error
  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    return client_->copy(to, from, size);
  }
  Result<std::uint64_t> mark() override { return client_->last_copy(); }
  Result<std::uint64_t> reached() override { return client_->done(); }
  Result<bool> idle() override {
    return client_->done().map([&](auto done) { return done >= client_->last_copy(); });
  }
  Result<> synchronize() override { return client_->finish(); }
  CudaStream handle() override { return nullptr; }
  Result<> clear(std::byte*, std::size_t) override { return none(); }
  Result<> follow(Stream&) override { return {}; }  // they are one
  Result<> launch(Kernel, Grid, const void*) override { return none(); }
  Result<> wait_until(const std::uint64_t*, std::uint64_t) override { return none(); }
  Result<> write(std::uint64_t*, std::uint64_t) override { return none(); }
  Result<> signal(const Fd&) override { return none(); }

 private:
  static tl::unexpected<Error> none() {
    return fail(ErrorCode::unavailable, "a stream of a GPU that another process serves does nothing but copy");
  }
  std::shared_ptr<Client> client_;
};

class RemoteAccess final : public PinnedAccess {
 public:
  RemoteAccess(std::shared_ptr<Client> client, Memory pinned)
      : PinnedAccess(std::move(pinned), std::make_unique<RemoteStream>(client)), client_(std::move(client)) {}
  Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> ranges) override {
    return client_->digests(ranges);
  }

 private:
  std::shared_ptr<Client> client_;
};

class Remote final : public RemoteDevice {
 public:
  Remote(std::shared_ptr<Client> client, std::string address)
      : client_(std::move(client)), address_(std::move(address)) {}

  void disconnect() override { client_->disconnect(); }
  MemoryKind kind() const override { return MemoryKind::cuda; }
  std::string address() const override { return address_; }
  std::string name() const override { return address_ + ", which its trainer serves"; }
  Result<Memory> allocate_pinned(std::size_t size) override {
    return client_->allocate(size).map([&](auto bytes) { return Memory{bytes, client_}; });
  }
  Result<Memory> import_shared(std::span<const Handle> handles) override {
    return side_by_side(handles)
        .and_then([&](const Memory& theirs) { return client_->import(theirs.bytes.data(), theirs.bytes.size()); })
        .map([&](auto here) {
          return Memory{here, client_};
        });
  }
  Result<std::unique_ptr<Stream>> make_stream(Priority) override { return std::make_unique<RemoteStream>(client_); }
  Result<std::unique_ptr<Access>> make_access(Priority) override {
    return allocate_pinned(PinnedAccess::kPinned).map([&](Memory pinned) -> std::unique_ptr<Access> {
      return std::make_unique<RemoteAccess>(client_, std::move(pinned));
    });
  }
  RemoteWrites remote_writes() const override { return RemoteWrites::elsewhere; }
  Result<> flush_remote_writes() override { return client_->needs_flush() ? client_->flush() : Result<>{}; }

  Result<Memory> allocate(std::size_t) override { return none(); }
  Result<Memory> allocate_mapped(std::size_t, std::size_t) override { return none(); }
  Result<Memory> pin(std::span<std::byte>) override { return none(); }
  Result<std::vector<Allocation>> allocations(std::span<std::byte>) override { return none(); }
  Result<Handle> share(const Allocation&) override { return none(); }
  Result<> prepare_kernels() override { return none(); }
  Result<std::unique_ptr<Stream>> adopt_stream(CudaStream) override { return none(); }
  Result<> has_stream_flags() override { return none(); }
  Result<Exported> export_dma_buf(std::span<std::byte>) override {
    return fail(ErrorCode::unreachable, "{}: only its trainer can export its memory", address_);
  }

 private:
  tl::unexpected<Error> none() const {
    return fail(ErrorCode::unavailable, "{} is another process's: its memory is copied and digested, no more",
                address_);
  }
  std::shared_ptr<Client> client_;
  const std::string address_;
};

}  // namespace

Result<std::shared_ptr<RemoteDevice>> connect_remote(Line line, const std::string& address) {
  const auto size = sealed_size(line.memory);
  if (!size) return tl::unexpected(size.error());
  if (*size != remote::kMemoryBytes)
    return fail(ErrorCode::corrupt, "pinned memory of {} came, of {} was expected", human_bytes(*size),
                human_bytes(remote::kMemoryBytes));
  auto shared = Mapping::of(line.memory, *size);
  if (!shared) return tl::unexpected(shared.error());
  const int flags = ::fcntl(line.socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(line.socket.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    return fail_errno("the socket to the trainer that serves its GPU's memory");
  return std::make_shared<Remote>(std::make_shared<Client>(std::move(line.socket), std::move(*shared)), address);
}

}  // namespace rejoin::device
