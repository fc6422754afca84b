// Connecting queue pairs by rdma_cm: the fabric's own way from an address to a path (InfiniBand's path records and
// partitions, iWARP), where an exchange of GIDs and numbers over TCP does not know enough. The queue pairs stay ours;
// rdma_cm carries their numbers and says with which attributes they are to be connected.
//
// librdmacm keeps the device open until the process ends: a driver that waits for its users before a removal then waits
// for that.
#pragma once

#include <map>

#include "base/fd.h"
#include "transport/ibverbs/queue_pair.h"
#include "transport/ibverbs/rdmacm_library.h"

namespace rejoin::transport::ibverbs {

class ConnectionManager {
 public:
  // Listens at this IPv4 or IPv6 address of an RDMA device (IPoIB's on InfiniBand), on a port that the system picks.
  static Result<std::unique_ptr<ConnectionManager>> start(const std::string& address);
  ~ConnectionManager();

  int fd() const { return channel_->fd; }
  const std::string& address() const { return address_; }
  std::uint16_t port() const { return port_; }

  // Whose queue pair, and which.
  struct Mine {
    EndpointId endpoint;
    std::uint32_t index = 0;
  };
  // Calls the peer's endpoint that `token` stands for there, for queue pair `number` of ours. Ends in `answered` or
  // `failed`.
  Result<> call(const Mine& mine, const std::string& address, std::uint16_t port, std::uint64_t token,
                std::uint32_t number, const Options& options);

  struct Event {
    enum class Kind { called, answered, failed } kind{};
    rdma_cm_id* connection = nullptr;
    std::uint64_t token = 0;  // called: what call() was given
    Mine mine;                // called: index only
    Path path;                // called, answered: how to connect the queue pair
    std::string why;          // failed
  };
  std::vector<Event> poll();  // never blocks

  // To `called`: one of these, at once. `number`: of our queue pair, connected already. Nothing happens where the
  // endpoint was forgotten meanwhile.
  Result<> accept(const Event& called, EndpointId endpoint, std::uint32_t number, const Options& options);
  void refuse(const Event& called);
  // To `answered`, when our queue pair is connected.
  Result<> establish(const Event& answered);

  void forget(EndpointId endpoint);

 private:
  struct Connection {
    Mine mine;
    std::uint64_t token = 0;
    rdma_conn_param parameters{};  // of a call
  };
  ConnectionManager() = default;
  std::optional<Event> look_at(const rdma_cm_event& event);
  std::optional<Event> next_step(rdma_cm_id* id, Connection& connection, rdma_cm_event_type type, int status);

  struct Destroy {
    void operator()(rdma_event_channel* channel) const { rdmacm().destroy_event_channel(channel); }
    void operator()(rdma_cm_id* id) const { rdmacm().destroy_id(id); }
  };
  std::unique_ptr<rdma_event_channel, Destroy> channel_;
  std::unique_ptr<rdma_cm_id, Destroy> listener_;
  std::string address_;
  std::uint16_t port_ = 0;
  std::map<rdma_cm_id*, Connection> connections_;  // owns the ids
};

}  // namespace rejoin::transport::ibverbs
