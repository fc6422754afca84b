// The UCX engine. A write is an active message whose bytes the receiver accepts only after it has checked key, range
// and endpoint; large ones go by rendezvous (over shared memory the receiver pulls them out of the sender's memory).
// The receiver acknowledges each write when its bytes are in place: that is its completion.
//
// engine.cc: set-up, regions, sleeping. greeting.cc: the handshake. endpoint.cc: failing and closing. datapath.cc:
// everything hot.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/endpoints.h"
#include "transport/event_queue.h"
#include "transport/handshake.h"
#include "transport/regions.h"
#include "transport/strangers.h"
#include "transport/transport.h"
#include "transport/ucx/factory.h"
#include "transport/ucx/library.h"
#include "transport/ucx/wire.h"
#include "transport/unsent.h"

namespace rejoin::transport::ucx {

class UcxEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make(const Options& options);
  ~UcxEngine() override;

  Result<Address> listen(const Address& where) override;
  void set_secrets(const Secrets& secrets) override { secrets_ = secrets; }
  void set_silence(Duration silence) override { strangers_.set_silence(silence); }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override;
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override;
  void deregister(RegionId region) override;
  RemoteRegion remote(RegionId region) const override;
  std::uint64_t refused() const override { return regions_.refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override;
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override;
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override;
  std::span<const Event> poll() override;
  bool arm() override;
  int event_fd() const override { return event_fd_; }
  void close(EndpointId endpoint) override;

 private:
  // The caller's: calling, then answering, once the listener has proven itself. The listener's: accepting.
  enum class Stage { calling, answering, accepting, open, failed };

  struct Greeting {
    Secret secret;  // the caller's, of this address, or the one that the caller has named
    Bytes hello;    // the caller's
    Nonce ours{}, theirs{};
  };
  struct Endpoint {
    EndpointId id;
    ucp_ep_h handle = nullptr;
    Stage stage = Stage::calling;
    std::unique_ptr<Greeting> greeting;  // until it is open
    std::uint64_t peer = 0;              // the peer's id of this endpoint, which heads everything we send
    std::uint64_t next_to_send = 0;
    std::uint64_t next_to_deliver = 0;
    std::map<std::uint64_t, Bytes> early;  // messages that overtook others, by sequence
    Unsent unsent;
    std::size_t receiving = 0;  // writes that are landing here now
    std::string failure;
  };

  // A write or read of ours. Its slot is free again when UCX is done with it and its completion has been reported.
  struct Operation {
    UcxEngine* engine = nullptr;
    std::uint64_t id = 0;  // generation << 32 | slot
    EndpointId endpoint;
    std::uint64_t context = 0;
    bool local_done = true;
    bool reported = true;
    bool acknowledged = false;
    RegionId region;              // the local one
    std::byte* target = nullptr;  // of a read
    std::uint64_t length = 0;
    wire::Write header{};
    Regions::Refusal refusal = Regions::Refusal::none;
  };

  // A message, acknowledgement or read reply that UCX may still be reading.
  struct Outgoing {
    UcxEngine* engine = nullptr;
    union {
      wire::Call call;
      wire::Challenge challenge;
      wire::Hello hello;
      wire::Welcome welcome;
      wire::Goodbye goodbye;
      wire::Message message;
      wire::Acknowledge acknowledge;
      wire::ReadRequest read_request;
      wire::ReadData read_data;
    };
    Bytes payload;
    EndpointId endpoint;
    std::size_t counted = 0;  // in the endpoint's `unsent`
    RegionId region;          // a read reply reads from this region
  };

  // A write or read reply on its way into our memory.
  struct Receive {
    UcxEngine* engine = nullptr;
    EndpointId endpoint;
    RegionId region;  // that it goes into
    wire::Write header{};
    std::uint64_t read_operation = 0;  // of our read, else 0
    std::byte* target = nullptr;
    Bytes bounce;  // where the sender pushes: copied to the target when whole, if the endpoint is still open
  };

  UcxEngine() = default;
  Result<> start(const Options& options);

  static ucs_status_t drop() { return UCS_OK; }  // UCX lets go of the bytes

  // endpoint.cc
  Endpoint* find(std::uint64_t id) { return find_endpoint(endpoints_, EndpointId(id)); }
  Result<Endpoint*> open_endpoint(EndpointId id) { return find_open_endpoint(endpoints_, id); }
  void finish_handle(ucp_ep_h handle);
  void drain(const std::function<bool()>& done);
  void report_failures();
  void fail_endpoint(Endpoint& endpoint, ErrorCode code, std::string why);
  void fail_operations(EndpointId endpoint, const Error& error);
  void say_goodbye(Endpoint& endpoint);
  void cut_off(RegionId region);
  ucs_status_t on_goodbye(const wire::Goodbye& goodbye);
  static void on_error(void* arg, ucp_ep_h handle, ucs_status_t status);

  // greeting.cc
  Result<Endpoint*> adopt(BytesView address, Stage stage);
  void take_call(const wire::Call& call, BytesView address);
  void look_after_strangers();
  void refuse(EndpointId stranger, ErrorCode code, const std::string& why);
  ucs_status_t on_call(const wire::Call& call, BytesView body);
  ucs_status_t on_challenge(const wire::Challenge& challenge);
  ucs_status_t on_hello(const wire::Hello& hello, BytesView body);
  ucs_status_t on_welcome(const wire::Welcome& welcome);

  // datapath.cc
  Operation& new_operation(EndpointId endpoint, std::uint64_t context, RegionId region);
  Operation* find_operation(std::uint64_t id);
  void settle(Operation& operation);
  void report(Operation& operation, std::optional<Error> error);
  Outgoing& new_outgoing();
  void post(Endpoint& endpoint, unsigned kind, Outgoing& out, std::size_t header_size, BytesView payload,
            std::uint32_t flags);
  void check_unsent(const Endpoint& endpoint);
  void acknowledge(Endpoint& endpoint, std::uint64_t operation, Regions::Refusal refusal);
  void deliver(Endpoint& endpoint, BytesView message);
  ucs_status_t on_message(const wire::Message& header, BytesView data);
  ucs_status_t on_write(const wire::Write& header, void* data, std::size_t size, bool rendezvous);
  ucs_status_t on_acknowledge(const wire::Acknowledge& header);
  ucs_status_t on_read_request(const wire::ReadRequest& header);
  ucs_status_t on_read_data(const wire::ReadData& header, void* data, std::size_t size, bool rendezvous);
  ucs_status_t land(Receive receive, std::byte* target, void* data, std::size_t size, bool rendezvous);
  void landed(const Receive& receive, ucs_status_t status);

  template <wire::Kind kind, typename Header>
  static ucs_status_t receive(void* arg, const void* header, std::size_t header_size, void* data, std::size_t size,
                              const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_outgoing_sent(void* request, ucs_status_t status, void* outgoing);
  static void on_landed(void* request, ucs_status_t status, std::size_t length, void* receive);

  Options options_;
  bool bounces_ = false;  // over TCP UCX lands bytes that the sender pushes; see "Fence" in docs/design-notes.md
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  Bytes address_;  // of the worker: what peers connect to
  bool listening_ = false;
  Secrets secrets_;
  SteadyClock clock_;
  Strangers strangers_;
  int event_fd_ = -1;
  Unguessable unguessable_;
  Regions regions_{unguessable_};
  EventQueue events_;

  std::unordered_map<std::uint64_t, std::unique_ptr<Endpoint>> endpoints_;
  std::unordered_map<ucp_ep_h, Endpoint*> by_handle_;
  std::vector<std::pair<ucp_ep_h, ucs_status_t>> errors_;  // from UCX's error callback, handled in poll()
  std::vector<std::pair<wire::Call, Bytes>> calls_;        // taken in poll(), not inside UCX's callback
  struct Ending {
    EndpointId endpoint;
    ErrorCode code{};
    std::string why;
  };
  std::vector<Ending> endings_;  // likewise

  std::deque<Operation> operations_;
  std::vector<std::uint32_t> free_operations_;
  std::deque<Outgoing> outgoing_;
  std::vector<Outgoing*> free_outgoing_;
};

}  // namespace rejoin::transport::ucx
