// The striped engine. Each endpoint has up to one link a rail; a link is one instance of the rail's own endpoint.
//
// Exactly once, whatever a rail does:
//  - Messages are numbered and kept until the peer has sent `received`. When the rail that carries them dies, all kept
//    ones are sent again, in order, over another; the receiver takes each number once.
//  - A piece of a write whose rail died is posted again only after the peer has sent `rail_down` for that instance of
//    the rail, which it does after closing (fencing) its end: the old copy can't land behind the new one. A piece of a
//    read needs no such message, since our own close is the fence.
//  - With `rail_down` the peer says which pieces had landed over it. Those are done, though no completion has arrived:
//    the write may have been notified, and its memory given to another. It remembers the last ones, which are enough
//    since no link runs far ahead of its oldest piece that is not complete, as it may where its NIC has several queues.
//  - The other way round, a NIC may have acknowledged a piece whose notification lies unread when the receiver closes
//    its end. So the sender keeps the tags of completed pieces until the peer has reported their write as in, and sends
//    them as `landed` when their rail ends.
//  - A notification is raised when all pieces of its write have been counted in, each once, and the write announced.
//  - A message says how many of its sender's writes were complete, and is kept until these have been notified here,
//    whichever rail is looked at first.
//
// engine.cc: set-up, regions, polling. links.cc: links coming and going. messages.cc: the messages between both ends.
// datapath.cc: pieces.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/seldom.h"
#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/striped/factory.h"
#include "transport/striped/wire.h"
#include "transport/unsent.h"

namespace rejoin::transport::striped {

class StripedEngine final : public Engine {
 public:
  StripedEngine(std::vector<std::unique_ptr<Engine>> rails, const Options& options, const Clock& clock);
  ~StripedEngine() override;
  Result<> start();

  Result<Address> listen(const Address& where) override;
  void set_secrets(const Secrets& secrets) override;
  void set_silence(Duration silence) override;
  void set_polled_on() override {
    for (auto& rail : rails_) rail->set_polled_on();
  }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  Result<RegionId> register_dma_buf(const DmaBuf& buffer, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override;
  std::uint64_t refused() const override;  // by the rails, in pieces, too
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return epoll_.get(); }
  void close(EndpointId endpoint) override;
  std::vector<Rail> rails() const override;
  std::optional<Duration> round_trip(EndpointId endpoint) const override;
  std::optional<std::uint64_t> acknowledged(EndpointId endpoint) const override;

 private:
  static constexpr std::uint64_t kMaxOpenWrites = 1 << 20;  // announced or begun, and not complete

  static constexpr std::uint32_t kNoRail = ~0u;
  enum class Stage { connecting, accepting, open, failed, closed };

  struct Operation {
    std::uint64_t context = 0;
    bool is_read = false, on_each_rail = false;
    LocalRange local;
    RemoteRange remote;
    std::uint64_t length = 0, piece_bytes = 0;
    std::uint32_t unfinished = 0;         // pieces
    std::uint32_t in_flight = 0;          // … of them posted on a rail
    std::optional<std::uint64_t> number;  // of a write with notification
    std::optional<Error> error;
  };
  struct Piece {
    std::uint64_t operation = 0;
    std::uint32_t index = 0;
    std::uint64_t nth = 0;  // of its link
    TimePoint posted{};
  };
  struct Link {
    std::uint32_t rail = 0, generation = 0;
    EndpointId endpoint;               // in the rail's engine
    bool open = false, ended = false;  // neither: connecting
    bool peer_fenced = false;          // the peer's end of an ended link is closed
    std::uint64_t bytes = 0;           // in flight
    std::uint64_t posted = 0;          // pieces, ever
    std::map<std::uint64_t, Piece> in_flight;
    std::vector<Piece> orphans;            // of an ended link, until peer_fenced
    std::deque<std::uint64_t> landed;      // tags of the last pieces that came over it
    std::set<std::uint64_t> landed_there;  // … as the peer has reported, when it is peer_fenced
    std::deque<std::uint64_t> completed;   // tags of pieces whose completion has come, of writes not reported as in
    TimePoint last_heard{}, last_finished{}, last_probed{};  // anything; a piece; asked
  };
  struct RailState {                 // of one endpoint
    Link* link = nullptr;            // current; null: down
    std::uint32_t generations = 0;   // the next link's
    std::uint32_t fenced_below = 0;  // the peer has been sent that links of lower generations are fenced here
    TimePoint retry_at = TimePoint::max();
    Duration backoff{};
    bool was_up = false;
    std::string never_up;  // why, as far as is known, where it has not been up so far
    std::string down;      // why, until it is reported: the end of a whole peer is not reported rail by rail
    Seldom reports{kSameLineAgain};
  };
  struct Sent {
    std::uint64_t number = 0;
    TimePoint posted{};
    Bytes bytes;
  };
  struct Incoming {  // a peer's write with notification
    std::vector<bool> landed;
    std::uint64_t count = 0;
    std::optional<std::uint64_t> pieces, value;  // once announced
  };
  struct Kept {  // a caller's message, or a part of one, ahead of notifications that come before it
    std::uint64_t writes_before = 0;
    bool more = false;
    Bytes bytes;
  };
  struct Numbers {  // of writes with notification: all that are below one, and others
    std::uint64_t all_below = 0;
    std::set<std::uint64_t> others;
    bool contains(std::uint64_t number) const { return number < all_below || others.contains(number); }
    void add(std::uint64_t number) {
      others.insert(number);
      while (others.erase(all_below) > 0) ++all_below;
    }
  };
  struct RemoteKeys {
    bool known = false;
    std::vector<wire::RailKey> rails;
    std::vector<std::uint64_t> waiting;  // operations
  };
  struct Endpoint {
    EndpointId id;
    Stage stage = Stage::connecting;
    std::string failure;
    bool initiator = false;
    bool announced = false, announced_end = false;  // the caller knows of it; and of its end
    std::array<std::uint64_t, 2> connection{};
    std::vector<Address> addresses;  // the initiator's: of the peer's rails
    std::vector<RailState> rails;
    std::string lone;                  // why it can't be connected with: it has one rail alone
    std::uint32_t expected_rails = 0;  // the accepting end's: so many of them the peer connects
    bool missing_told = false;         // those that had not come by then
    TimePoint expected_until{};        // those that have not come yet are waited for until then
    std::vector<std::unique_ptr<Link>> links;
    std::uint32_t primary = kNoRail;  // the rail that carries messages
    // Over any rail; and since when without a pause in which the peer, or this process, may just have stood still.
    TimePoint last_heard{}, awake_since{};

    std::uint64_t next_message = 0, expected = 0, reported_received = 0, bytes_since_report = 0;
    std::deque<Sent> unreceived;  // sent, and not known to be received
    Unsent unsent;                // … in bytes
    MessageParts parts;           // of a caller's message coming in
    std::deque<Kept> kept;
    std::size_t kept_bytes = 0;

    std::uint64_t next_operation = 1, next_piece = 1, next_write = 0;
    std::map<std::uint64_t, Operation> operations;
    std::deque<Piece> pending;
    bool dirty = false;
    std::map<std::uint64_t, RemoteKeys> keys;
    // Rails that failed to get at a local region or a remote key (we can't tell which): not used for the two together.
    struct Blind {
      std::uint32_t rail = 0;
      std::uint64_t region = 0, key = 0;
      auto operator<=>(const Blind&) const = default;
    };
    std::set<Blind> blind;

    std::map<std::uint64_t, Incoming> incoming;
    Numbers in;                            // of the peer's: notified here, or withdrawn
    Numbers over;                          // of ours: complete
    std::uint64_t all_in_there_below = 0;  // of ours: these are in at the peer, as it has reported
  };
  using RailRegions = std::vector<std::optional<RegionId>>;  // none: the rail could not register it

  Endpoint* find(EndpointId id) { return find_endpoint(endpoints_, id); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }

  // engine.cc
  Result<> look_at_own_rails();
  Result<> own_rail(std::uint32_t rail);
  void say_down(std::uint32_t rail, const Error& why);
  Result<RegionId> register_on_rails(std::span<std::byte> memory, Access access,
                                     const std::function<Result<RegionId>(Engine&)>& on_rail);
  Endpoint& make_endpoint(Stage stage);
  Duration looks_every() const;
  TimePoint next_timer() const;

  // links.cc
  Result<> connect_rail(Endpoint& endpoint, std::uint32_t rail);
  void on_accepted(std::uint32_t rail, const Event& event);
  void on_link_open(Endpoint& endpoint, Link& link);
  void end_link(Endpoint& endpoint, Link& link, const std::string& why);
  void report_fenced(Endpoint& endpoint, std::uint32_t rail, std::uint32_t generation,
                     const std::deque<std::uint64_t>& landed);
  void report_landed(Endpoint& endpoint, const Link& link, const std::deque<std::uint64_t>& completed);
  void retry_later(RailState& rail);
  bool rails_expected(const Endpoint& endpoint) const;
  void shut(Endpoint& endpoint, Stage stage, const Error& error);
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, const std::string& why);
  bool drained(Endpoint& endpoint);  // removes ended links that nothing is expected of
  void sweep();
  void check_rails(Endpoint& endpoint);
  TimePoint waiting_since(const Endpoint& endpoint, const Link& link) const;
  std::uint32_t rails_of_both(const Endpoint& endpoint) const;
  void note_other_number(std::size_t theirs);
  void note_missing(Endpoint& endpoint);
  void probe(Endpoint& endpoint);
  Link* add_link(Endpoint& endpoint, std::uint32_t rail, std::uint32_t generation, EndpointId at);

  // datapath.cc
  void on_rail_event(std::uint32_t rail, const Event& event);
  void post_again(Endpoint& endpoint, const Link& link, const Piece& piece);
  void on_piece_landed(Endpoint& endpoint, Link& link, std::uint64_t tag);
  void count_in(Endpoint& endpoint, std::uint64_t tag);
  void settle_incoming(Endpoint& endpoint, std::uint64_t number);
  void mark_in(Endpoint& endpoint, std::uint64_t number);
  void on_piece_done(Endpoint& endpoint, Link& link, std::uint64_t piece, const std::optional<Error>& error);
  void avoid(Endpoint& endpoint, const Link& link, const Piece& piece, const Error& error);
  void finish_piece(Endpoint& endpoint, std::uint64_t operation, const std::optional<Error>& error);
  void complete(Endpoint& endpoint, std::uint64_t operation);
  void send_control(Endpoint& endpoint, wire::Header header, BytesView rest = {});
  void post(Endpoint& endpoint, Operation operation);
  void queue_pieces(Endpoint& endpoint, std::uint64_t operation);
  void answer_keys(Endpoint& endpoint, const wire::Header& header, BytesView rest);
  void pump(Endpoint& endpoint);
  struct Choice {
    Link* link = nullptr;  // null: all are full, or none reaches both ends
    bool reachable = false;
    RegionId local;  // on the link's rail
    RemoteRegion remote;
  };
  Choice choose_link(Endpoint& endpoint, const Operation& operation, std::uint32_t piece, std::uint64_t length);
  bool is_for_bulk(std::uint32_t rail) const { return rail >= options_.first_bulk_rail; }
  static bool is_far_ahead(const Link& link);
  void touch(Endpoint& endpoint);
  static std::uint64_t length_of(const Operation& operation, std::uint32_t piece);

  // messages.cc
  void on_rail_message(Endpoint& endpoint, Link& link, BytesView bytes);
  void on_numbered(Endpoint& endpoint, const wire::Header& header, BytesView rest);
  void on_message(Endpoint& endpoint, const wire::Header& header, BytesView part);
  void deliver(Endpoint& endpoint, BytesView part, bool more);
  void deliver_kept(Endpoint& endpoint, std::uint64_t all_in_below);
  void on_rail_down(Endpoint& endpoint, const wire::Header& header, BytesView landed);
  void on_landed(Endpoint& endpoint, const wire::Header& header, BytesView tags);
  void on_all_in(Endpoint& endpoint, std::uint64_t below);
  void check_unsent(Endpoint& endpoint);
  void repeat_messages(Endpoint& endpoint);
  void report_received(Endpoint& endpoint);
  void malformed(Endpoint& endpoint, std::string_view what);

  struct Batch {  // what pump() posts on a rail; kept for its memory
    Link* link = nullptr;
    std::vector<Write> writes;
    std::vector<Read> reads;
  };

  std::vector<std::unique_ptr<Engine>> rails_;
  std::vector<Seldom> own_down_;  // by rail: lines that say so
  Seldom other_number_told_;
  Options options_;
  const Clock& clock_;
  Duration check_every_{};
  Fd epoll_, timer_;
  Unguessable unguessable_{options_.seed};
  Regions regions_{unguessable_};
  std::unordered_map<std::uint64_t, RailRegions> rail_regions_;  // by our region
  EventQueue events_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  Secrets secrets_;
  std::vector<std::unique_ptr<Endpoint>> closing_;                   // closed by the caller, rails not yet drained
  std::map<std::array<std::uint64_t, 2>, Endpoint*> by_connection_;  // accepted ones
  std::set<std::array<std::uint64_t, 2>> closed_connections_;        // accepted and closed: a late rail is refused
  std::deque<std::array<std::uint64_t, 2>> closed_order_;
  std::vector<std::unordered_map<std::uint64_t, std::pair<Endpoint*, Link*>>> by_link_;  // per rail: its endpoints
  std::vector<EndpointId> dirty_;
  std::vector<Batch> batches_;  // by rail
  bool to_sweep_ = false;
  TimePoint now_{}, checked_{}, timer_at_ = TimePoint::max();
};

}  // namespace rejoin::transport::striped
