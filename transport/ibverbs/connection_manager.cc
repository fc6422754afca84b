#include "transport/ibverbs/connection_manager.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>

#include <cerrno>
#include <cstring>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::transport::ibverbs {

namespace {

constexpr int kResolveMs = 2000;  // rdma_cm's own patience for an address, and for a path

// rdma_cm's private data: what both sides must agree on.
struct Call {
  std::uint64_t magic = wire::kMagic;
  std::uint64_t token = 0;
  std::uint32_t index = 0, unused = 0;
};

struct AddressInfo {
  addrinfo* list = nullptr;
  ~AddressInfo() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

Result<> resolve(AddressInfo& info, const std::string& address, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &info.list); error != 0)
    return fail(ErrorCode::invalid_argument, "'{}' is no IP address of an RDMA device: {}", address,
                ::gai_strerror(error));
  return {};
}

rdma_conn_param parameters_of(std::uint32_t number, const Options& options) {
  rdma_conn_param parameters{};
  parameters.responder_resources = parameters.initiator_depth = RDMA_MAX_RESP_RES;
  parameters.retry_count = options.retries;
  parameters.rnr_retry_count = 7;
  parameters.srq = 1;
  parameters.qp_num = number;
  return parameters;
}

Result<Path> path_of(rdma_cm_id* id) {
  Path path;
  ibv_qp_attr initial{};
  int mask = 0;
  initial.qp_state = IBV_QPS_INIT;
  path.receive.qp_state = IBV_QPS_RTR;
  path.send.qp_state = IBV_QPS_RTS;
  if (rdmacm().init_qp_attr(id, &initial, &mask) != 0 ||
      rdmacm().init_qp_attr(id, &path.receive, &path.receive_mask) != 0 ||
      rdmacm().init_qp_attr(id, &path.send, &path.send_mask) != 0)
    return fail_errno("rdma_init_qp_attr");
  path.partition = initial.pkey_index;
  return path;
}

}  // namespace

Result<std::unique_ptr<ConnectionManager>> ConnectionManager::start(const std::string& address) {
  if (auto there = load_rdmacm(); !there) return tl::unexpected(there.error());
  std::unique_ptr<ConnectionManager> made(new ConnectionManager());
  made->address_ = address;
  made->channel_.reset(rdmacm().create_event_channel());
  if (!made->channel_)
    return fail(ErrorCode::unavailable,
                "rdma_cm is not to be had: {}; is the module rdma_ucm loaded, and may this user open "
                "/dev/infiniband/rdma_cm?",
                std::strerror(errno));
  if (::fcntl(made->fd(), F_SETFL, ::fcntl(made->fd(), F_GETFL) | O_NONBLOCK) != 0) return fail_errno("fcntl");
  AddressInfo info;
  if (auto resolved = resolve(info, address, 0); !resolved) return tl::unexpected(resolved.error());
  rdma_cm_id* id = nullptr;
  if (rdmacm().create_id(made->channel_.get(), &id, nullptr, RDMA_PS_TCP) != 0) return fail_errno("rdma_create_id");
  made->listener_.reset(id);
  if (rdmacm().bind_addr(id, info.list->ai_addr) != 0 || id->verbs == nullptr)
    return fail(ErrorCode::unavailable, "rdma_cm can't listen at {}: {}; is it the address of an RDMA device's port?",
                address, std::strerror(errno));
  if (rdmacm().listen(id, 256) != 0) return fail_errno("rdma_listen");
  made->port_ = ntohs(rdmacm().get_src_port(id));
  return made;
}

ConnectionManager::~ConnectionManager() {
  for (auto& [id, connection] : connections_) rdmacm().destroy_id(id);
}

Result<> ConnectionManager::call(const Mine& mine, const std::string& address, std::uint16_t port, std::uint64_t token,
                                 std::uint32_t number, const Options& options) {
  AddressInfo local, peer;
  if (auto resolved = resolve(local, address_, 0); !resolved) return resolved;
  if (auto resolved = resolve(peer, address, port); !resolved) return resolved;
  rdma_cm_id* id = nullptr;
  if (rdmacm().create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) != 0) return fail_errno("rdma_create_id");
  connections_[id] = {.mine = mine, .token = token, .parameters = parameters_of(number, options)};
  std::uint8_t service = options.traffic_class;
  (void)rdmacm().set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &service, sizeof service);
  if (rdmacm().resolve_addr(id, local.list->ai_addr, peer.list->ai_addr, kResolveMs) == 0) return {};
  const int error = errno;
  connections_.erase(id);
  rdmacm().destroy_id(id);
  return fail(ErrorCode::unavailable, "rdma_cm finds no way from {} to {}: {}", address_, address,
              std::strerror(error));
}

std::vector<ConnectionManager::Event> ConnectionManager::poll() {
  std::vector<Event> events;
  for (rdma_cm_event* next = nullptr; rdmacm().get_cm_event(channel_.get(), &next) == 0;) {
    auto event = look_at(*next);
    rdmacm().ack_cm_event(next);  // before its id may be destroyed
    if (event) events.push_back(std::move(*event));
  }
  return events;
}

std::optional<ConnectionManager::Event> ConnectionManager::look_at(const rdma_cm_event& event) {
  if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) {
    Event called{.kind = Event::Kind::called, .connection = event.id};
    connections_[event.id] = {};  // until it is accepted or refused
    Call call;
    BytesView bytes(static_cast<const std::byte*>(event.param.conn.private_data), event.param.conn.private_data_len);
    auto path = path_of(event.id);
    if (!take(bytes, call) || call.magic != wire::kMagic || !path) {
      called.kind = Event::Kind::failed;
      called.why = path ? "a caller by rdma_cm is no verbs engine of this version" : path.error().message;
      return called;
    }
    called.token = call.token;
    called.mine.index = call.index;
    called.path = *path;
    return called;
  }
  auto found = connections_.find(event.id);
  if (found == connections_.end()) return std::nullopt;
  return next_step(event.id, found->second, event.event, event.status);
}

std::optional<ConnectionManager::Event> ConnectionManager::next_step(rdma_cm_id* id, Connection& connection,
                                                                     rdma_cm_event_type type, int status) {
  Event event{.connection = id, .mine = connection.mine};
  const auto failed = [&](const std::string& what) {
    event.kind = Event::Kind::failed;
    event.why = fmt::format("rdma_cm: {}", what);
    return event;
  };
  switch (type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      if (rdmacm().resolve_route(id, kResolveMs) != 0) return failed(std::strerror(errno));
      return std::nullopt;
    case RDMA_CM_EVENT_ROUTE_RESOLVED: {
      const Call call{.token = connection.token, .index = connection.mine.index};
      connection.parameters.private_data = &call;
      connection.parameters.private_data_len = sizeof call;
      if (rdmacm().connect(id, &connection.parameters) != 0) return failed(std::strerror(errno));
      return std::nullopt;
    }
    case RDMA_CM_EVENT_CONNECT_RESPONSE: {
      auto path = path_of(id);
      if (!path) return failed(path.error().message);
      event.kind = Event::Kind::answered;
      event.path = *path;
      return event;
    }
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
      return failed(
          fmt::format("{}: {}", rdmacm().event_str(type), status < 0 ? std::strerror(-status) : "by the peer"));
    default: return std::nullopt;  // what follows once it is connected: the control connection and the device tell that
  }
}

Result<> ConnectionManager::accept(const Event& called, EndpointId endpoint, std::uint32_t number,
                                   const Options& options) {
  auto connection = connections_.find(called.connection);
  if (connection == connections_.end()) return {};
  connection->second.mine = {endpoint, called.mine.index};
  rdma_conn_param parameters = parameters_of(number, options);
  if (rdmacm().accept(called.connection, &parameters) != 0) return fail_errno("rdma_accept");
  return {};
}

void ConnectionManager::refuse(const Event& called) {
  if (connections_.erase(called.connection) == 0) return;
  (void)rdmacm().reject(called.connection, nullptr, 0);
  rdmacm().destroy_id(called.connection);
}

Result<> ConnectionManager::establish(const Event& answered) {
  if (!connections_.contains(answered.connection)) return {};
  if (rdmacm().establish(answered.connection) != 0) return fail_errno("rdma_establish");
  return {};
}

void ConnectionManager::forget(EndpointId endpoint) {
  std::erase_if(connections_, [&](const auto& entry) {
    if (entry.second.mine.endpoint != endpoint) return false;
    rdmacm().destroy_id(entry.first);
    return true;
  });
}

}  // namespace rejoin::transport::ibverbs
