// The TCP engine: non-blocking sockets under one epoll. Bytes of a write go from the poster's memory to the kernel and
// from the kernel to their place, nowhere else.
//
// engine.cc: set-up, regions, connecting, closing. greeting.cc: who comes in. datapath.cc: bytes out and
// in. frames.cc: what came in.
#pragma once

#include <unistd.h>

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/deadlines.h"
#include "base/fd.h"
#include "base/seldom.h"
#include "transport/acceptor.h"
#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/handshake.h"
#include "transport/names.h"
#include "transport/regions.h"
#include "transport/socket_address.h"
#include "transport/strangers.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/records.h"
#include "transport/tcp/unanswered.h"
#include "transport/tcp/wire.h"
#include "transport/unsent.h"

namespace rejoin::transport::tcp {

std::string peer_of(const Fd& socket);  // its address; empty: the kernel does not know it any more
// A refused tuning option costs speed, never correctness.
void set_option(const Fd& socket, int level, int name, int value);
// Between two processes of one machine no network is to be shared: a congestion control that paces what it sends (BBR)
// only costs timers there.
void use_no_pacing_inside_a_machine(const Fd& socket);

constexpr std::uint64_t kListener = 0, kNames = 1;  // epoll tags; no endpoint has such an id
// What is read ahead of one connection: of most of a large job's no more than a message now and then.
constexpr std::size_t kBuffer = 128 * KiB, kQuietBuffer = 4 * KiB, kStrangersBuffer = 1 * KiB;
// Less while large bodies come, one among so many frames at least: what is read ahead of them has to be copied to their
// place, which takes longer than another call.
constexpr std::size_t kLargeBody = 64 * KiB, kAheadOfLarge = 4 * KiB;
constexpr std::uint32_t kFramesOfLarge = 16;

class TcpEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make(const Options& options);
  ~TcpEngine() override;

  Result<Address> listen(const Address& where) override;
  void set_secrets(const Secrets& secrets) override { secrets_ = secrets; }
  void set_polled_on() override { polled_on_ = true; }
  Result<> usable() override;
  void set_silence(Duration silence) override {
    silence_ = silence;
    calls_.set_silence(silence);
    strangers_.set_silence(silence);
  }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override { return regions_.remote(region); }
  std::uint64_t refused() const override { return regions_.refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override { return events_.empty() && unflushed_.empty() && unread_.empty(); }
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;
  std::optional<Duration> round_trip(EndpointId endpoint) const override;
  std::optional<std::uint64_t> acknowledged(EndpointId endpoint) const override;

 private:
  // One that connects has no socket before its peer's name is resolved.
  enum class Stage { connecting, greeting, accepting, open, failed };

  // A frame on its way out. `body` points into `owned` or into a region.
  struct Frame {
    wire::Header header;
    Bytes owned;
    BytesView body;
    RegionId region;  // the body's, where it is not owned
    std::size_t sent = 0;
    std::size_t counted = 0;  // in the endpoint's `unsent`
  };

  struct Operation {
    std::uint64_t context = 0;
    bool is_read = false;
    std::byte* target = nullptr;  // of a read; null, too, where its region is empty
    std::uint64_t length = 0;
    RegionId region;  // the local one
  };

  struct Endpoint {
    EndpointId id;
    Fd socket;
    Stage stage = Stage::connecting;
    std::string failure;
    bool wants_write = false;  // as registered with epoll
    bool dirty = false;        // in unflushed_
    std::deque<Frame> out;
    Unsent unsent;
    std::vector<Bytes> spare;  // for the next frames: see keep_spare()
    std::unordered_map<std::uint64_t, Operation> operations;
    std::uint64_t next_operation = 1;

    // The frame now coming in.
    wire::Header header{};
    bool in_body = false;
    std::byte* target = nullptr;  // where its body goes; null: into `body`, or nowhere when `discard`
    bool discard = false;
    Regions::Refusal refusal = Regions::Refusal::none;
    RegionId landing;  // the region of `target`
    std::uint64_t filled = 0;
    int low_water = 1;                           // bytes that make the socket readable
    std::uint32_t since_large = kFramesOfLarge;  // frames since the last large body, as far as it is counted
    Bytes body;
    Bytes buffer;  // bytes read ahead: [begin, end)
    std::size_t begin = 0, end = 0;

    // Until it is open.
    std::deque<SocketAddress> further;  // of the peer's name, for when this one can't be reached
    std::uint32_t addresses = 1;        // with those that have been tried
    TimePoint called_at{};              // this one, where there are further ones
    Secret secret;                      // the caller's, or the one that the caller has named
    Bytes hello;                        // the caller's
    Nonce ours{}, theirs{};
    bool challenged = false;  // the listener has proven itself
    std::unique_ptr<KeyExchange> exchange;

    std::size_t to_read_ahead() const {  // at most
      const std::size_t room = buffer.size() - end;
      const bool much = since_large == kFramesOfLarge || (in_body && discard) || records;
      return much ? room : std::min(room, kAheadOfLarge);
    }

    Unanswered unanswered;
    bool unread = false;               // in unread_
    bool by_kernel = false;            // its records; of a caller, that the kernel could make them
    std::unique_ptr<Records> records;  // of an encrypted one, once both sides have proven themselves
  };

  explicit TcpEngine(const Options& options) : options_(options) {}
  Result<> start();

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }
  Endpoint& make_endpoint(Stage stage);
  Result<Endpoint*> adopt(Fd socket, Stage stage);
  Result<> take_up(Endpoint& endpoint, Fd socket);
  void limit_unacknowledged(const Endpoint& endpoint) const;
  static void discard_unread(const Endpoint& endpoint);
  void part(Endpoint& endpoint);
  Result<> begin_connection(Endpoint& endpoint, std::deque<SocketAddress> addresses);
  void look_at_names();
  void probe_when_idle(const Fd& socket) const;
  Result<Fd> begin_connection(std::deque<SocketAddress>& addresses) const;
  Result<Fd> begin_connection(const SocketAddress& address) const;
  void finish_connecting(Endpoint& endpoint);
  bool try_further(Endpoint& endpoint);
  void look_after_calls(TimePoint now);
  void look_for_answers();
  void watch(Endpoint& endpoint, bool wants_write);
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why);
  void fail_damaged(Endpoint& endpoint);
  void fail_operations(Endpoint& endpoint, const Error& error);

  // greeting.cc
  void accept_all();
  void look_after_greetings();
  void refuse(const Endpoint& stranger, ErrorCode code);
  bool greets(const Endpoint& endpoint) const;
  void call(Endpoint& endpoint);
  void on_call(Endpoint& endpoint);
  void on_challenge(Endpoint& endpoint);
  void on_hello(Endpoint& endpoint);
  std::string local() const { return options_.local_now ? options_.local_now() : options_.local; }
  std::uint64_t magic() const { return options_.encrypt ? wire::kMagicOfEncrypted : wire::kMagic; }
  Nonce begin_greeting(Endpoint& endpoint) const;
  bool encrypt(Endpoint& endpoint, bool calls);
  bool begin_records(Endpoint& endpoint, kernel_tls::Direction direction);
  bool open(Endpoint& endpoint);

  // datapath.cc
  void add(Endpoint& endpoint, Frame frame);
  void check_unsent(Endpoint& endpoint);
  static void keep_spare(Endpoint& endpoint, Bytes sent);
  void queue(Endpoint& endpoint, const wire::Header& header, BytesView copied);
  void queue_region(Endpoint& endpoint, const wire::Header& header, BytesView body, RegionId region);
  void flush(Endpoint& endpoint);
  void flush_posted();  // of all endpoints
  ssize_t send_some(Endpoint& endpoint, const msghdr& message);
  void receive(Endpoint& endpoint);
  void await_more(Endpoint& endpoint);
  void acknowledge(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal);

  // frames.cc
  bool parse(Endpoint& endpoint);
  bool begin_frame(Endpoint& endpoint);
  bool begin_body(Endpoint& endpoint);
  void finish_frame(Endpoint& endpoint);
  void on_acknowledge(Endpoint& endpoint);
  void on_read_request(Endpoint& endpoint);
  bool malformed(Endpoint& endpoint, std::string_view what);

  const Options options_;
  bool by_kernel_ = false;  // the records, of who wants that, too
  const SteadyClock clock_;
  const pid_t process_ = ::getpid();
  Fd epoll_;
  Fd listener_;
  Secrets secrets_;  // of who connects here
  Duration silence_ = deadlines::kSilence;
  Acceptor acceptor_{kListener};
  Strangers strangers_;
  Greetings calls_;  // of ours, from connect() on
  Names names_;      // of peers
  Looks looks_;
  std::vector<EndpointId> trying_;  // of those, to peers whose names have further addresses
  Seldom damaged_{kSameLineAgain};  // a line in the log
  Unguessable unguessable_;
  Regions regions_{unguessable_};
  EventQueue events_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  std::vector<EndpointId> unflushed_;
  bool polled_on_ = false;
  std::vector<EndpointId> unread_;  // encrypted ones that hold bytes which epoll does not know of
};

}  // namespace rejoin::transport::tcp
